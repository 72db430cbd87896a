"""`ProcessSession`: preemption and aborts of several processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # its stub names fewer

from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.session import Session

_LOOK_SECONDS = 0.02


class ProcessSession(Session):
    """A session whose processes monitor one another by heartbeats.

    Args:
        collectives: The strategy's collectives.
    """

    def __init__(self, collectives: ProcessCollectives) -> None:
        super().__init__(collectives)
        self.collectives: ProcessCollectives = collectives
        self.group = collectives.group
        self._store: Store | None = None

    @property
    def is_preempted(self) -> bool:
        return self._is_preempted or (self.group.heartbeat is not None and self.group.heartbeat.leaving)

    def announce_preemption(self) -> None:
        super().announce_preemption()
        if self.group.heartbeat is not None:
            self.group.heartbeat.announce_leaving()

    def set_abort_handler(self, handler: Callable[[], object] | None) -> None:
        if self.group.heartbeat is not None:
            self.group.heartbeat.last_duty = handler

    def end_training(self, error: BaseException | None) -> None:
        super().end_training(error)
        self.group.end_training(error)

    def find_writers(self, directory: Path) -> list[int]:
        if self._store is None and not self.group.is_alone:
            self._store = self.group.open_store()  # now: once a process is lost, its store may not answer
        return [*range(self.collectives.world_size)]

    def send_to_main(self, key: str, value: Any) -> None:
        assert self._store is not None, "find_writers() comes first"
        try:
            self._store.set(key, json.dumps(value))
        except dist.DistError as error:
            raise OSError(f"rank 0 cannot be reached ({error})") from error

    def receive(self, key: str, rank: int) -> Any:
        store, heartbeat = self._store, self.group.heartbeat
        assert store is not None, "find_writers() comes first"
        while not store.check([key]):
            if heartbeat is not None and heartbeat.is_missing(rank) and not store.check([key]):
                raise OSError(f"{self.collectives.describe_rank(rank)} ended before it had written its part")
            time.sleep(_LOOK_SECONDS)
        value = json.loads(store.get(key))
        store.delete_key(key)
        return value

"""`ProcessSession`: preemption and aborts of several processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from trainer_kit.strategies.peer_channel import PeerChannel
from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.session import Session

logger = logging.getLogger("trainer_kit")


class ProcessSession(Session):
    """A session whose processes monitor one another by heartbeats.

    Args:
        collectives: The strategy's collectives.
    """

    def __init__(self, collectives: ProcessCollectives) -> None:
        super().__init__(collectives)
        self.collectives: ProcessCollectives = collectives
        self.group = collectives.group

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

    def watch(self) -> Callable[[], None]:
        return self.group.watch()

    def end_training(self, error: BaseException | None) -> None:
        super().end_training(error)
        self.group.end_training(error)

    def find_writers(self, directory: Path) -> list[int]:
        folder = self.collectives.broadcast(directory.absolute())
        can_write = self.collectives.gather_object(os.access(folder, os.W_OK))
        return [rank for rank in range(self.collectives.world_size) if rank == 0 or can_write[rank]]

    def find_readers(self, directory: Path) -> list[int]:
        folder = self.collectives.broadcast(directory.absolute())
        can_read = self.collectives.gather_object(os.access(folder, os.R_OK))
        return [rank for rank in range(self.collectives.world_size) if rank == 0 or can_read[rank]]

    def open_peer_channel(self) -> PeerChannel | None:
        return self.collectives.open_peer_channel()

    def send_to_main(self, key: str, text: str) -> None:
        assert self.group.heartbeat is not None, "setup() comes first"
        if not self.group.heartbeat.send(key, text):
            logger.debug("%s could not be sent", key)

    def receive(self, key: str, rank: int) -> str | None:
        assert self.group.heartbeat is not None, "setup() comes first"
        return self.group.heartbeat.receive(key, rank)

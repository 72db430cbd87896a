"""`ProcessSession`: preemption and aborts of several processes."""

from __future__ import annotations

from collections.abc import Callable

from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.session import Session


class ProcessSession(Session):
    """A session whose processes monitor one another by heartbeats.

    Args:
        collectives: The strategy's collectives.
    """

    def __init__(self, collectives: ProcessCollectives) -> None:
        super().__init__(collectives)
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

    def end_training(self, error: BaseException | None) -> None:
        super().end_training(error)
        self.group.end_training(error)

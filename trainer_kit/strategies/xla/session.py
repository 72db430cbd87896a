"""`XLASession`: hosts in lockstep exit together."""

from __future__ import annotations

from trainer_kit.strategies.process_session import ProcessSession


class XLASession(ProcessSession):
    """A session in which no host breaks off alone: the loop agrees on it after the step."""

    @property
    def is_preempted(self) -> bool:
        return self.group.is_alone and super().is_preempted

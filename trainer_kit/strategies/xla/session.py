"""`XLASession`: the session of hosts that run in lockstep."""

from __future__ import annotations

from trainer_kit.strategies.peer_channel import PeerChannel
from trainer_kit.strategies.process_session import ProcessSession


class XLASession(ProcessSession):
    """A session in which no host exits alone: the hosts agree on it after the step."""

    @property
    def is_preempted(self) -> bool:
        return self.group.is_alone and super().is_preempted

    def open_peer_channel(self) -> PeerChannel | None:
        if self.group.is_alone:
            return None
        raise ValueError("PeerCopies is not possible on several TPU hosts, of which only the first writes; remove it")

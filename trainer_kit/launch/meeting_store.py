"""`MeetingStore`: the store that a machine meets the others at, of another machine or its own."""

from __future__ import annotations

from collections import deque

from torch._C._distributed_c10d import TCPStore

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.link import Link
from trainer_kit.launch.other_stores import OtherStores, better_store
from trainer_kit.launch.served_store import ServedStore
from trainer_kit.launch.store import answers, own_candidate, serve_free_port

_ANSWER_SECONDS, _SERVE_SECONDS = 0.2, 1.0  # for other candidates; before this machine serves a store in their place


class MeetingStore:
    """The store that a machine meets the others at: that of the first candidate that answers, or its own.

    Args:
        config: Launch configuration.

    Attributes:
        link: Connection to the store; None without one.
        served: The store, if this machine serves it; else None.
        number: Number of stores that this machine has been connected to.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._candidates, self._own = config.candidates, own_candidate(config)
        self._others = OtherStores(config, self._own)
        self._better: int | None = None  # place of the candidate to wait at
        self._rank_servers: deque[TCPStore] = deque(maxlen=2)  # ranks of the last membership may still be leaving
        self.link: Link | None = None
        self.served: ServedStore | None = None
        self.number = 0

    @property
    def is_candidate(self) -> bool:
        """Whether this machine may serve the store."""
        return self._own is not None

    @property
    def address(self) -> str:
        """Address by which the other machines reach the store."""
        assert self.link is not None
        return self._candidates[self._own] if self._own is not None and self.served else self.link.address

    def answers(self) -> bool:
        """Return whether the store answers."""
        return self.link is not None and (self.served is not None or self.link.is_alive())

    def find(self, last: int) -> bool:
        """Connect to the first candidate that answers, or serve the store where that is this machine's turn.

        Args:
            last: Number of this machine's last membership; 0 before the first.

        Returns:
            Whether there is a store.
        """
        order, is_new = list(range(len(self._candidates))), not last
        # A new run begins at the first candidate alone, and only if no other one serves a store.
        order.sort(key=lambda place: (place != self._better, place == self._own and is_new, place))
        there = self._others.published(None if is_new else _SERVE_SECONDS) if len(self._candidates) > 1 else {0: 0}
        for place in order:
            if place == self._own:
                if place == 0 or not is_new:
                    self._serve()
                    return True
            elif (place == self._better or place in there) and self._connect(self._candidates[place]):
                return True
        return False

    def find_better(self, last: int) -> bool:
        """Connect to another candidate's store with a newer membership than `last`; return whether there is one."""
        return self.has_better(last) and self._better is not None and self._connect(self._candidates[self._better])

    def has_better(self, last: int) -> bool:
        """Return whether another candidate has a store that this machine should wait at, which `find` prefers.

        Args:
            last: See `find`.
        """
        formed = 0 if self.link is None else self.link.published().membership.number
        here = None
        if self.link is not None:
            here = self._own if self.served else self._candidates.index(self.link.address)
        place = better_store(self._others.published(_ANSWER_SECONDS), here, formed, last)
        self._better = self._better if place is None else place
        return place is not None

    def settle(self) -> None:
        """Prefer no store any more, since the machines have met."""
        self._better = None

    def leave(self) -> None:
        """Leave the store, and end it if this machine serves it."""
        if self.link is not None:
            self.link.stop()
            self.link = None
        if self.served is not None:
            self.served.abandon()
            self.served = None

    def _connect(self, address: str) -> bool:
        if not answers(address, self._config.port):
            return False
        try:
            self.link = Link(address, self._config.port, self._config.run_id, self._config.sign_seconds)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and len(self._candidates) == 1:
                raise
            return False
        self.number += 1
        return True

    def _serve(self) -> None:
        assert self._own is not None
        if self.served is None:
            self.served = ServedStore(self._config, self._candidates[self._own], self._serve_ranks)
        self.link = self.served.link()
        self.number += 1

    def _serve_ranks(self) -> int:
        """Serve an empty store for the ranks of a new membership, since theirs hold the addresses of their processes.

        Returns:
            Its port.
        """
        self._rank_servers.append(serve_free_port())
        return self._rank_servers[-1].port

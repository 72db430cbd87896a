"""`Machines`: what the launchers of a run report to one another while their ranks train."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.elastic_rendezvous import ElasticRendezvous
from trainer_kit.launch.news import CHANGE, FAILED, LOST, OPEN, Change, News, final_failure
from trainer_kit.launch.rendezvous import StaticRendezvous

_LOOK_SECONDS = 1.0
_PARTING_SECONDS = 5.0
_KNOWN_SECONDS = 0.5  # for the machine with the store to notice that a launcher has ended
_HEARD = "trainer_kit/heard"


class Machines:
    """Channel to the launchers of the other machines, through the store of the rendezvous.

    Args:
        config: Launch configuration.
        rendezvous: Rendezvous that the store comes from.

    Attributes:
        rendezvous: The argument of the same name.
    """

    def __init__(self, config: LaunchConfig, rendezvous: StaticRendezvous | ElasticRendezvous) -> None:
        self._config = config
        self.rendezvous = rendezvous
        self._next_look = self._next_change = 0.0
        self._next_opening = 0.0
        self._open: str | None = None  # not known yet
        self._store: Store | None = None
        self._place, self._count = 0, 1

    @property
    def host(self) -> str:
        """Name of this machine where the run may have several; "" else."""
        return socket.gethostname() if self._config.num_nodes > 1 else ""

    def join(self, store: Store, place: int, count: int) -> None:
        """Use the empty store of a new rendezvous.

        Args:
            store: The store.
            place: Index of this machine, from 0.
            count: Number of machines.
        """
        self._store, self._place, self._count = store, place, count
        self._next_look = self._next_opening = 0.0
        self._open = None

    def leave(self) -> None:
        """Release the store of the last rendezvous: this machine is alone until the next one."""
        self._store = None
        self._place, self._count = 0, 1

    def gather(self, text: str) -> list[str]:
        """Return the texts of all machines, by place. Collective over machines.

        Raises:
            torch.distributed.DistStoreError: If a machine does not come.
        """
        store = self._reach()
        store.set(f"trainer_kit/text-{self._place}", text)
        return [store.get(f"trainer_kit/text-{place}").decode() for place in range(self._count)]

    def announce(self, failure: ProcessFailed, goes_on: bool, is_loss: bool = False) -> News:
        """Announce a failed rank of this machine, and return what all machines go by: the first announcement.

        Args:
            failure: The failure.
            goes_on: Whether this machine would restart its ranks.
            is_loss: Whether it follows from the loss of a machine.
        """
        own = News(failure, goes_on, is_loss, self.host)
        if not self._is_reachable():
            return own
        try:
            first = News.from_json(self._reach().compare_set(FAILED, "", own.to_json()))
            self._part(first.goes_on)
        except RuntimeError:  # the store is gone
            return own
        return first

    def news(self, at_once: bool = False) -> News | None:
        """Return another machine's announcement since the rendezvous; None without one or without an answer.

        Args:
            at_once: Whether to look even if the last look was less than a second ago.
        """
        if not self._is_time(at_once):
            return None
        try:
            if not self._is_reachable() or not self._reach().check([FAILED]):
                return None
            first = News.from_json(self._reach().get(FAILED))
            self._part(first.goes_on)
        except RuntimeError:  # the store is gone
            return None
        return first

    def missed_end(self) -> Callable[[], str]:
        """Return a function for use after the next meeting, which returns the news of the failure that ended the run.

        They stand in the membership that ends now: another machine may announce a failure while this one is on its way
        to the meeting. The function returns "" if there are none.
        """
        # A rendezvous that does not last needs the port of its store again.
        store, number = self._store if self.rendezvous.is_lasting else None, self.rendezvous.store_number

        def look() -> str:
            if store is None or self.rendezvous.store_number != number:  # a lost one might block for long
                return ""
            try:
                return final_failure(store)
            except RuntimeError:  # the store is gone
                return ""

        return look

    def lost(self) -> str:
        """Return which machines of the membership are lost, a moment after a failure; "" if none is known to be."""
        if self._count == 1 or not self.rendezvous.is_lasting:
            return ""
        deadline = time.monotonic() + _KNOWN_SECONDS
        names = ""
        try:
            while not names and time.monotonic() < deadline:
                time.sleep(0.05)
                if not self._is_reachable():
                    return "the machine with the store, which does not answer"
                names = self._reach().get(LOST).decode() if self._reach().check([LOST]) else ""
        except RuntimeError:
            return "the machine with the store, which does not answer"
        return names

    def is_time_for_change(self) -> bool:
        """Return whether to ask for a `change`: at most once a second."""
        if not self.rendezvous.is_lasting or time.monotonic() < self._next_change:
            return False
        self._next_change = time.monotonic() + _LOOK_SECONDS
        return True

    def change(self) -> Change | None:
        """Return which machine joins or leaves the run, so that all meet again; None without one or an answer."""
        if not self.rendezvous.is_lasting:
            return None
        try:
            if not self._is_reachable() or not self._reach().check([CHANGE]):
                return None
            return Change.from_json(self._reach().get(CHANGE))
        except RuntimeError:  # the store is gone
            return None

    def open_for(self, digest: str | None) -> None:
        """Announce the digest of the training that newcomers can join in the process.

        A change is announced within a second.

        Args:
            digest: The digest; "" if they cannot, None before that is known, or if they no longer can.
        """
        text, is_unknown = digest or "", digest is None and self._open is None
        if is_unknown or text == self._open or time.monotonic() < self._next_opening:
            return
        self._next_opening = time.monotonic() + _LOOK_SECONDS
        with contextlib.suppress(RuntimeError):  # the store is gone
            if self._is_reachable():
                self._reach().set(OPEN, text)
                self._open = text

    def can_be_replaced(self) -> bool:
        """Return whether the others can continue without this machine, and another one waits for its place."""
        try:
            return self._can_leave() and self.rendezvous.waiting() > 0
        except RuntimeError:  # the store is gone
            return False

    def _can_leave(self) -> bool:
        least = self._config.min_nodes
        are_enough = least is not None and self._count - 1 >= least
        return are_enough and self._is_reachable() and self.rendezvous.can_leave()

    def announce_leaving(self, host: str) -> bool:
        """Announce that this machine leaves, if the others can continue without it, and return whether they can.

        Args:
            host: Name of this machine.
        """
        if not self._can_leave():
            return False
        change = Change(f"{host} leaves: the run saves and continues without it", is_joining=False)
        try:
            self._reach().compare_set(CHANGE, "", change.to_json())
        except RuntimeError:  # the store is gone
            return False
        self.rendezvous.expect_to_leave()
        return True

    def _part(self, goes_on: bool) -> None:
        """Keep the store, on the machine that serves it, until the others have read it."""
        store, deadline = self._reach(), time.monotonic() + _PARTING_SECONDS
        heard = store.add(_HEARD, 1)
        if goes_on and self.rendezvous.is_lasting:
            return
        rendezvous = self.rendezvous
        while rendezvous.serves and heard < min(self._count, rendezvous.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
            heard = store.add(_HEARD, 0)

    def _is_time(self, at_once: bool) -> bool:
        if self._count == 1 or (time.monotonic() < self._next_look and not at_once):
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        return True

    def _is_reachable(self) -> bool:
        """Return whether the store answers; a request to the store itself might block for long."""
        if self._config.num_nodes == 1 or self._store is None:
            return False
        return self.rendezvous.answers()

    def _reach(self) -> Store:
        assert self._store is not None
        return self._store

"""`Link`: a machine's connection to the store, with its signs of life."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from trainer_kit.errors import CutOffError, ProcessesLeft, ProcessFailed
from trainer_kit.launch.membership import Membership
from trainer_kit.launch.news import CHANGE, News, final_failure, opening
from trainer_kit.launch.presence import be_present, end_connection
from trainer_kit.launch.published import (
    ENDED,
    HERE,
    MACHINES,
    MEMBERSHIP,
    PRESENCE,
    End,
    Facts,
    Here,
    Published,
    beat_key,
    machine_key,
)
from trainer_kit.launch.store import LimitedStore, answers, connect_store

_SILENCE_SECONDS = 5.0
_EARLY_OPENING_SECONDS = 10.0  # for a training that has just begun, or changed its machines; some never open
STILL_TRAINING = "the others may still be training; stopped, start again to join them"


class Chance(enum.Enum):
    """What a machine that waits can expect of the membership that runs."""

    PLACE = enum.auto()
    """It has a place."""

    OPEN = enum.auto()
    """Its ranks can prepare to join."""

    LATER = enum.auto()
    """They may be able to, in a moment or after the machines have changed."""

    NONE = enum.auto()
    """They cannot join."""


class IsNewcomerError(Exception):
    """The run has its machines, so that this one comes to it as a newcomer, whose ranks prepare."""


class RunEndedError(RendezvousGracefulExitError):
    """The run has ended before its ranks had done their work.

    Attributes:
        error: What this machine reports: the `ProcessFailed` or `ProcessesLeft` of other machines.
    """

    def __init__(self, error: ProcessFailed | ProcessesLeft) -> None:
        super().__init__(str(error))
        self.error = error


class Link:
    """A machine's connection to the store, with its signs of life.

    Args:
        address: Address of the store.
        port: Port of the store.
        run_id: Name of the run.
        interval: Seconds between two signs of life.
        serves: Whether this machine serves the store, so that it arrives first.

    Attributes:
        address: The argument of the same name.
        port: The argument of the same name.
        store: Client of the store.
        number: Number of this machine, in order of arrival.
    """

    def __init__(self, address: str, port: int, run_id: str, interval: float, serves: bool = False) -> None:
        self.address, self.port = address, port
        self.store = LimitedStore(PrefixStore(run_id, connect_store(address, port)))
        presence = 0 if serves else int(self.store.get(PRESENCE))  # set when the first machine has its number
        self.number: int = self.store.add(MACHINES, 1) - 1
        self._beats = PrefixStore(run_id, connect_store(address, port))  # the other client may be busy
        self._interval = interval
        self._next_question = 0.0
        self._opening = (0, 0.0)  # number of the membership last asked for, and the end of its first moment
        self._done = threading.Event()
        self._beats.add(beat_key(self.number), 1)
        self._presence = None if serves else be_present(address, presence, self.number)
        self._thread = threading.Thread(target=self._beat, name="trainer_kit signs of life", daemon=True)
        self._thread.start()

    def announce(self, facts: Facts) -> None:
        """Write what the keeper needs to know of this machine.

        Args:
            facts: What it says about itself.
        """
        self.store.set(machine_key(self.number), facts.to_json())

    def published(self) -> Published:
        """Return the newest membership of the store."""
        return Published.from_json(self.store.get(MEMBERSHIP))

    def here(self) -> Here:
        """Return the machines that wait in the store."""
        return Here.from_json(self.store.get(HERE))

    def open_for(self, number: int) -> str | None:
        """Return the digest of the training that newcomers can join, "" if they cannot; None: not known yet.

        Args:
            number: Number of the membership that runs.
        """
        return opening(PrefixStore(str(number), self.store))

    def chance(self, newest: Published, may_join: bool) -> Chance:
        """Return what this machine can expect of a membership; each has a moment to take in newcomers.

        Args:
            newest: The membership that runs.
            may_join: Whether this machine's ranks can prepare to join it.
        """
        number = newest.membership.number
        if self.number in newest.numbers:
            return Chance.PLACE
        if not may_join:
            return Chance.NONE
        if number != self._opening[0]:
            self._opening = number, time.monotonic() + _EARLY_OPENING_SECONDS
        running = PrefixStore(str(number), self.store)
        digest = opening(running)
        if digest is None:
            return Chance.LATER if time.monotonic() < self._opening[1] else Chance.NONE
        if digest == "":
            return Chance.NONE
        return Chance.LATER if running.check([CHANGE]) else Chance.OPEN

    def check_end(self, past: Sequence[Membership]) -> None:
        """Raise an error if the run has ended, also for a machine that waits for a place in it.

        Args:
            past: See `Machine`; a failure may have been announced while this machine was on its way to meet the others.

        Raises:
            RunEndedError: If a failure has ended it, or the ranks have left because of a signal.
            OSError: If a launcher has failed, or the machine with the store has waited for the others in vain.
            CutOffError: If the machines with this store may not continue, but others may.
            RendezvousGracefulExitError: If the ranks have done their work.
        """
        for membership in (*past[-1:], self.published().membership):
            if news := final_failure(PrefixStore(str(membership.number), self.store)):
                raise RunEndedError(News.from_json(news).failure)
        if not self.store.check([ENDED]):
            return
        match End(self.store.get(ENDED).decode()):
            case End.LEFT:
                raise RunEndedError(ProcessesLeft(143))
            case End.FAILED:
                raise OSError("the run has failed on another machine, whose launcher says why")
            case End.TIMED_OUT:
                raise OSError("the machine with the store has waited for the others in vain; start all again")
            case End.GIVEN_UP:
                raise CutOffError(f"{self.here().describe(socket.gethostname())}: {STILL_TRAINING}")
            case End.OVER:
                raise RendezvousGracefulExitError("the run has ended")

    def is_alive(self) -> bool:
        """Return whether this machine can give signs of life, and the store answers.

        One that has not answered is asked again only after a while, since each question may take seconds.
        """
        if time.monotonic() < self._next_question:
            return False
        is_alive = self._thread.is_alive() and answers(self.address, self.port)
        if not is_alive:
            self._next_question = time.monotonic() + _SILENCE_SECONDS
        return is_alive

    def stop(self) -> None:
        """Give no more signs of life."""
        self._done.set()
        if self._presence is not None:
            end_connection(self._presence)

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._done.wait(self._interval):
                self._beats.add(beat_key(self.number), 1)

"""`Link`: a machine's connection to the store, with its signs of life."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainer_kit.launch.keeper import (
    HERE,
    MACHINES,
    MEMBERSHIP,
    PRESENCE,
    Facts,
    Here,
    Published,
    beat_key,
    machine_key,
)
from trainer_kit.launch.news import CHANGE, final_failure, opening
from trainer_kit.launch.presence import be_present, end_connection
from trainer_kit.launch.store import answers, connect_store

_SILENCE_SECONDS = 5.0
_OPENING_SECONDS = 10.0


class IsNewcomerError(Exception):
    """The run has its machines, so that this one comes to it as a newcomer, whose ranks prepare."""


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
        tcp_store: The same client, without the prefix of the run.
    """

    def __init__(self, address: str, port: int, run_id: str, interval: float, serves: bool = False) -> None:
        self.address, self.port = address, port
        self.tcp_store: TCPStore = connect_store(address, port)
        self.store: Store = PrefixStore(run_id, self.tcp_store)
        presence = 0 if serves else int(self.store.get(PRESENCE))  # set when the first machine has its number
        self.number: int = self.store.add(MACHINES, 1) - 1
        self._beats = PrefixStore(run_id, connect_store(address, port))  # the other client may be busy
        self._interval = interval
        self._next_question = 0.0
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
        """Return the digest of the training that newcomers can join, "" if they no longer can; None: not known yet.

        Args:
            number: Number of the membership that runs.
        """
        return opening(PrefixStore(str(number), self.store))

    def wait_for_opening(self, number: int, is_stopped: Callable[[], bool]) -> None:
        """Wait a moment for a training that has just changed its machines to take in newcomers; some never do.

        Args:
            number: See `open_for`.
            is_stopped: Returns whether to stop waiting.
        """
        end = time.monotonic() + _OPENING_SECONDS
        while self.open_for(number) is None and time.monotonic() < end and not is_stopped():
            time.sleep(0.1)

    def takes_in_newcomers(self, number: int) -> bool:
        """Return whether newcomers can prepare to join a membership; not while its machines are about to change.

        Args:
            number: See `open_for`.
        """
        running = PrefixStore(str(number), self.store)
        return bool(opening(running)) and not running.check([CHANGE])

    def has_failed(self, number: int) -> bool:
        """Return whether a failure in a membership has ended the run.

        Args:
            number: Number of the membership.
        """
        return bool(final_failure(PrefixStore(str(number), self.store)))

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

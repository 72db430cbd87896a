"""`Keeper`: decides which machines train together, on the machine that serves the store.

Keys of the store. Each machine takes a number N from `machines`, writes `machine/N` and adds 1 to `beat/N` again and
again. The keeper publishes `membership`, the port of its `presence`, and `ended` when the run is over. What machines
exchange about a membership is under its number, such as `3/trainer_kit/change`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.membership import Machine, Membership, newcomers, next_membership, waiting
from trainer_kit.launch.news import CHANGE, FAILED, Change, News
from trainer_kit.utils.units import format_duration

MACHINES, MEMBERSHIP, ENDED, HERE, PRESENCE = "machines", "membership", "ended", "here", "presence"
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_LOST_SECONDS = 25.0  # the ranks of the others notice a lost machine before, unless they are just starting
_PARTING_SECONDS = 300.0  # as long as torch's agent waits for the others at the end


def machine_key(number: int) -> str:
    """Return the key of what a machine says about itself."""
    return f"machine/{number}"


def beat_key(number: int) -> str:
    """Return the key of a machine's signs of life."""
    return f"beat/{number}"


class Published(NamedTuple):
    """A membership as the machines read it.

    Attributes:
        number: See `Membership`.
        machines: See `Membership`.
        run: See `Membership`.
        hosts: Host names, by place.
        gone: Hosts that belonged to the membership before, but not to this one.
        joined: Hosts that belong to this one, but not to the one before; empty for the first.
    """

    number: int = 0
    machines: tuple[int, ...] = ()
    run: str = ""
    hosts: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Published:
        """Read the text of the store."""
        number, machines, run, *names = json.loads(text)
        return cls(number, tuple(machines), run, *map(tuple, names))


class Keeper:
    """Watches the machines' signs of life and publishes memberships.

    It counts signs of life by its own clock, since the clocks of machines differ.

    Args:
        store: A client of the store for the keeper alone.
        least: Smallest number of machines.
        most: Largest number of machines.
        last_call: Seconds to wait for more machines than the smallest number before the first membership.
        patience: Seconds without a sign of life after which a machine counts as gone.
        clock: Returns the time in seconds.
        ended: Numbers of machines whose launchers have ended, see `Presence`; None: unknown.
    """

    def __init__(
        self,
        store: Store,
        least: int,
        most: int,
        last_call: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        ended: deque[int] | None = None,
    ) -> None:
        self._store = store
        self._least, self._most, self._last_call, self._patience = least, most, last_call, patience
        self._clock = clock
        self._last = Membership()
        self._hosts: dict[int, str] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._arrived = self._looked = clock()
        self._here = 0
        self._alive: list[Machine] = []
        self._left: set[int] = set()
        self._ended: deque[int] = deque() if ended is None else ended
        self._gone: set[int] = set()  # launchers that have ended, unless they give another sign of life
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        store.set(MEMBERSHIP, Published().to_json())
        store.set(HERE, "0")

    def start(self) -> None:
        """Start the thread that looks at the store."""
        self._thread = threading.Thread(target=self._run, name="trainer_kit keeper", daemon=True)
        self._thread.start()

    def stop(self, is_hurried: Callable[[], bool]) -> None:
        """Announce the end of the run, and wait until the machines have heard of it and have left.

        Args:
            is_hurried: Returns whether to stop waiting.
        """
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._store.set(ENDED, "1")
        deadline = time.monotonic() + _PARTING_SECONDS
        while time.monotonic() < deadline and not is_hurried():
            self.look()
            if not self._alive:
                return
            time.sleep(_LOOK_SECONDS)

    def alive(self) -> int:
        """Return how many machines of the last membership give signs of life."""
        return sum(machine.number in self._last.machines for machine in self._alive)

    def look(self) -> None:
        """Read the signs of life; publish a membership, or that a machine can join, where it is time."""
        self._read_machines()
        if self._store.check([ENDED]):
            return
        if self._last.machines and self._left.issuperset(self._last.machines):
            self._store.set(ENDED, "1")
            return
        is_over = self._clock() - self._arrived >= self._last_call
        formed = next_membership(self._last, self._alive, self._least, self._most, is_over)
        if formed is not None:
            self._publish(formed)
        else:
            self._announce_changes()
        here = len(waiting(self._last, self._alive))
        if here != self._here:
            self._here = here
            self._store.set(HERE, str(here))

    def _announce_changes(self) -> None:
        """Announce in the running membership which machines can join, and which one is lost."""
        running = PrefixStore(str(self._last.number), self._store)
        coming = newcomers(self._last, self._alive, self._most)
        if coming:
            names = ", ".join(machine.host for machine in coming)
            verb, whom = ("joins", "it") if len(coming) == 1 else ("join", "them")
            change = Change(f"{names} {verb}: the run saves and goes on with {whom}", is_joining=True)
            running.compare_set(CHANGE, "", change.to_json())
        for number in set(self._last.machines) - self._left:
            seconds = self._looked - self._beats[number][1]
            if seconds > max(_LOST_SECONDS, self._patience):
                text = f"{self._hosts[number]} has not answered for {format_duration(seconds)}"
                running.compare_set(
                    FAILED, "", News(ProcessFailed(text, rank=-1, exit_code=None), goes_on=None).to_json()
                )

    def _run(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            self.look()

    def _read_machines(self) -> None:
        now = self._clock()
        pause = now - self._looked
        if pause > _PAUSE_SECONDS:  # this process stood still, and signs of life may be on their way
            self._beats = {number: (beat, changed + pause) for number, (beat, changed) in self._beats.items()}
        self._looked = now
        for number in range(self._store.add(MACHINES, 0)):
            if number not in self._beats and self._store.check([machine_key(number), beat_key(number)]):
                self._beats[number], self._arrived = (b"", now), now
        numbers = sorted(set(self._beats) - self._left)
        if not numbers:
            self._alive = []
            return
        raw = self._store.multi_get([*map(machine_key, numbers), *map(beat_key, numbers)])
        said, beats = raw[: len(numbers)], raw[len(numbers) :]
        self._alive = []
        for number, text, beat in zip(numbers, said, beats, strict=True):
            host, after, place, run, has_left = json.loads(text)
            self._hosts[number] = host
            if has_left:
                self._left.add(number)
                continue
            if beat != self._beats[number][0]:
                self._beats[number] = (beat, now)
                self._gone.discard(number)
            if now - self._beats[number][1] <= self._patience:
                self._alive.append(Machine(number, host, after, place, run))
        while self._ended:
            self._gone.add(self._ended.popleft())
        self._alive = [machine for machine in self._alive if machine.number not in self._gone]

    def _publish(self, formed: Membership) -> None:
        before, now = self._last.machines, formed.machines
        gone = tuple(self._hosts[number] for number in before if number not in now)
        joined = tuple(self._hosts[number] for number in now if before and number not in before)
        hosts = tuple(self._hosts[number] for number in now)
        self._last = formed
        self._store.set(MEMBERSHIP, Published(formed.number, now, formed.run, hosts, gone, joined).to_json())

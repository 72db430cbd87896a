"""`PeerTable`: the state of a run's other processes, from the beats that they write."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer_kit.utils.process_identity import process_state
from trainer_kit.utils.units import format_duration

_KINDS = ("failed", "gone", "lost", "slow", "follows", "left")


class Beat(NamedTuple):
    """Report of a process about itself.

    Attributes:
        number: Number of beats that the process has written.
        host: Host name.
        namespace: PID namespace; 0 if the system has only one.
        pid: PID in that namespace.
        place: Code location of the main thread, for people.
        waits: Whether the main thread may wait there for other processes.
        idle: Seconds since the last progress.
        left: Whether the process has left the run.
        error: The error by which the process ends; empty without one.
        follows: Whether that error reports that another process is missing, or the process left since it missed one.
        heard: Whether the process knows that rank 0 has left.
        vouched: Number of times that other processes have renewed this beat, because they saw the process run.
    """

    number: int
    host: str
    namespace: int
    pid: int
    place: str
    waits: bool
    idle: float
    left: bool
    error: str
    follows: bool
    heard: bool
    vouched: int = 0


class Problem(NamedTuple):
    """A process that will not join a collective, or only late.

    Attributes:
        rank: Rank of the process.
        kind: "failed" (by its own error), "gone", "lost" (does not answer), "slow", "follows" (ended because of
            another process) or "left".
        text: Description for people.
    """

    rank: int
    kind: str
    text: str


class LastBeat(NamedTuple):
    """Newest beat of a process.

    Attributes:
        raw: The beat as stored; empty before the first.
        beat: The parsed beat; None before the first.
        changed: Monotonic time at which the beat last changed, in seconds.
        spoke: Monotonic time at which the process itself last wrote a beat, in seconds.
    """

    raw: bytes
    beat: Beat | None
    changed: float
    spoke: float


class PeerTable:
    """State of the run's processes, as this one sees it.

    One thread updates the table from the store; other threads read it.

    Args:
        rank: Rank of this process.
        patience: Seconds without an answer after which a process counts as lost.

    Attributes:
        answered: Monotonic time of the store's last answer, in seconds.
        grace_until: Monotonic time before which silence and idleness do not count, since this process was stopped.
        seen: Newest beat by rank, of the processes that this one observes.
    """

    def __init__(self, rank: int, patience: float) -> None:
        self.rank, self.patience = rank, patience
        self.answered = self.grace_until = time.monotonic()
        self.seen: dict[int, LastBeat] = {}
        self._board: tuple[list[Problem], list[int]] = ([], [])

    def take_in(self, beats: dict[int, bytes], board: bytes) -> None:
        """Update the table with an answer of the store.

        Args:
            beats: Raw beats by rank; empty bytes before a process's first beat.
            board: The board that rank 0 publishes; empty before the first.
        """
        now = self.answered = time.monotonic()
        if board and self.rank != 0:
            problems, silent = json.loads(board)
            self._board = ([Problem(*problem) for problem in problems], silent)
        for rank, raw in beats.items():
            old = self.seen.get(rank)
            if old is None or raw != old.raw:
                beat = read_beat(raw)
                same = old is not None and old.beat is not None and beat is not None and old.beat.number == beat.number
                self.seen[rank] = LastBeat(raw, beat, now, old.spoke if same and old else now)

    def board(self) -> str:
        """Return the board that rank 0 publishes: the worst problems and the silent ranks."""
        return json.dumps((self.problems()[:8], self.silent()))

    def silent(self) -> list[int]:
        """Return the ranks of other processes that have not answered for half of `patience`."""
        late = [rank for rank in self._beats() if self._silence(rank) > self.patience / 2]
        ended = {problem.rank for problem in self.problems() if problem.kind != "lost"} | {self.rank}
        return [rank for rank in dict.fromkeys(late + self._board[1]) if rank not in ended]

    def problems(self) -> list[Problem]:
        """Return the problems of other processes, from rank 0's board and the beats seen here; the worst first."""
        problems = {problem.rank: problem for problem in self._board[0]}
        for rank, beat in self._beats().items():
            if beat.error:
                kind, verb = ("follows", "ended") if beat.follows else ("failed", "failed")
                problems[rank] = Problem(rank, kind, f"{_who(rank, beat)} {verb}: {beat.error}")
            elif beat.left and beat.follows:
                text = f"{_who(rank, beat)} has left the run, in which it missed another process"
                problems[rank] = Problem(rank, "follows", text)
            elif beat.left:
                problems[rank] = Problem(rank, "left", f"{_who(rank, beat)} has left the run")
            elif self._silence(rank) > self.patience:
                problems[rank] = self._lost(rank, beat)
        problems.pop(self.rank, None)
        return _worst_first(problems.values())

    def root_causes(self) -> list[Problem]:
        """Return the processes that failed or are missing, without those that ended because of them.

        The operating system is asked too, about processes of this machine.
        """
        causes = {problem.rank: problem for problem in self.problems() if problem.kind in ("failed", "lost")}
        for rank, beat in self._beats().items():
            state = "" if rank in causes or rank == self.rank or beat.error or beat.left else state_of(beat)
            if state in ("gone", "stopped"):
                text = "has ended without a message" if state == "gone" else "does not answer (it is stopped)"
                causes[rank] = Problem(rank, "gone", f"{_who(rank, beat)} {text}")
        return _worst_first(causes.values())

    def is_missing(self, rank: int) -> bool:
        """Return whether a process has left the run, has failed, has ended, or does not answer."""
        beat = self._beats().get(rank)
        if beat is None:
            return False
        return beat.left or bool(beat.error) or self._silence(rank) > self.patience or state_of(beat) == "gone"

    def suspects(self, seconds: float) -> list[Problem]:
        """Return suspects if no process is known to be missing.

        These are the processes that have not answered for `seconds`, else those that do not wait, else all others.
        """
        beats = {rank: beat for rank, beat in self._beats().items() if rank != self.rank}
        mute = [self._lost(rank, beat) for rank, beat in beats.items() if self._silence(rank) >= seconds]
        busy = [Problem(rank, "slow", self.account(rank)) for rank in beats if not self._may_wait(rank)]
        return mute or busy or [Problem(rank, "slow", self.account(rank)) for rank in beats]

    def standing(self, seconds: float) -> tuple[dict[int, float], list[int]]:
        """Return the idle time of each rank without progress for `seconds`, and those of them that may be waiting."""
        ended = {problem.rank for problem in self.problems()}
        stood = {rank: self._stood(rank) for rank in self._beats() if rank not in ended}
        stood = {rank: time for rank, time in stood.items() if time >= seconds}
        return stood, [rank for rank in stood if self._may_wait(rank)]

    def all_wait(self, ranks: Sequence[int], seconds: float) -> bool:
        """Return whether all of these processes have waited for others for `seconds`, without progress."""
        _, waiting = self.standing(seconds)
        return {*ranks} <= {*waiting}

    def account(self, rank: int) -> str:
        """Describe where a process is, and for how long."""
        beat = self._beats()[rank]
        aside = "; it runs, but does not answer" if self._is_mute(rank) else ""
        return f"{_who(rank, beat)} has been for {format_duration(self._stood(rank))} in {beat.place}{aside}"

    def first(self) -> str:
        """Describe rank 0, and whether it is stopped or gone."""
        beat = self._beats().get(0)
        return "rank 0" if beat is None else f"{_who(0, beat)}{_aside(beat)}"

    def first_has_left(self) -> bool:
        """Return whether rank 0 has left the run, with or without an error."""
        beat = self._beats().get(0)
        return beat is not None and beat.left

    def all_have_heard(self) -> bool:
        """Return whether all other processes that can answer have left, or know that rank 0 has."""
        return all(
            rank == self.rank or beat.heard or beat.left or self._silence(rank) > self.patience / 2
            or state_of(beat) in ("gone", "stopped")
            for rank, beat in self._beats().items()
        )  # fmt: skip

    def _beats(self) -> dict[int, Beat]:
        return {rank: seen.beat for rank, seen in list(self.seen.items()) if seen.beat is not None}

    def _silence(self, rank: int) -> float:
        """Return the seconds without a beat by or for a process, while the store answered."""
        return self.answered - max(self.seen[rank].changed, self.grace_until)

    def _own_silence(self, rank: int) -> float:
        """Return the seconds without a beat that the process wrote itself, while the store answered."""
        return max(0.0, self.answered - max(self.seen[rank].spoke, self.grace_until))

    def _is_mute(self, rank: int) -> bool:
        return self._own_silence(rank) > self.patience / 2

    def _stood(self, rank: int) -> float:
        beat = self.seen[rank].beat
        return self._own_silence(rank) + (beat.idle if beat else 0.0)

    def _may_wait(self, rank: int) -> bool:
        beat = self.seen[rank].beat
        return beat is not None and beat.waits and not self._is_mute(rank)

    def _lost(self, rank: int, beat: Beat) -> Problem:
        seconds = self.answered - self.seen[rank].changed
        return Problem(
            rank, "lost", f"{_who(rank, beat)} has not answered for {format_duration(seconds)}{_aside(beat)}"
        )


def read_beat(raw: bytes) -> Beat | None:
    """Parse a beat of the store; None before the first."""
    return Beat(*json.loads(raw)) if raw else None


def machine() -> tuple[str, int]:
    """Return this machine's host name and PID namespace; the namespace is 0 on systems without."""
    try:
        return socket.gethostname(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname(), 0


def state_of(beat: Beat) -> str:
    """Return the system's state of a process: "runs", "stopped" or "gone"; "" if it is not visible from here."""
    if (beat.host, beat.namespace) != machine():
        return ""
    state = process_state(beat.pid)
    return "stopped" if state == "traced" else state


def _who(rank: int, beat: Beat) -> str:
    return f"rank {rank} ({beat.host}, process {beat.pid})"


def _aside(beat: Beat) -> str:
    state = state_of(beat)
    return f" (it is {state})" if state in ("stopped", "gone") else ""


def _worst_first(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (_KINDS.index(problem.kind), problem.rank))

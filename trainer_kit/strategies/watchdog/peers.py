"""`PeerTable`: what a process knows of the others of its run, from the beats that they write."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

import psutil

_KINDS = ("failed", "gone", "lost", "slow", "follows", "left")


class Beat(NamedTuple):
    """What a process says of itself.

    Attributes:
        number: How many beats of this process there have been.
        host: Its machine.
        namespace: In which numbers of processes mean something.
        pid: Its number there.
        place: Where its main thread is.
        waits: Whether it may wait there for others.
        idle: Seconds since it last made progress.
        left: Whether it has left the run.
        error: By which error it ends.
        follows: Whether that error says that another process is missing.
        heard: Whether it knows that rank 0 has left.
        vouched: How often others have written this beat anew, because they saw the process run.
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
    """A process that others would wait for in vain.

    Attributes:
        rank: Its number.
        kind: "failed" (by an error of its own), "gone", "lost" (does not answer), "slow", "follows" (ended because
            of another process) or "left".
        text: The fact, for people.
    """

    rank: int
    kind: str
    text: str


class LastBeat(NamedTuple):
    """The newest beat of a process (none before the first), when it last changed, and when that was its own doing."""

    raw: bytes
    beat: Beat | None
    changed: float
    spoke: float


class PeerTable:
    """What a process knows of the others.

    One thread writes what it reads from the store; others look.

    Args:
        rank: Number of this process.
        patience: Seconds without an answer after which a process is lost.

    Attributes:
        answered: When the store answered last.
        grace_until: Until when nobody is blamed for silence or for standing, since this process was stopped itself.
        seen: The newest beat of each process that this one looks at.
    """

    def __init__(self, rank: int, patience: float) -> None:
        self.rank, self.patience = rank, patience
        self.answered = self.grace_until = time.monotonic()
        self.seen: dict[int, LastBeat] = {}
        self._board: tuple[list[Problem], list[int]] = ([], [])

    def take_in(self, beats: dict[int, bytes], board: bytes) -> None:
        """Notes what the store has answered: beats by rank (empty before the first), and the board of rank 0."""
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
        """What rank 0 tells all others: the worst problems, and who has not answered for a while."""
        return json.dumps((self.problems()[:8], self.silent()))

    def silent(self) -> list[int]:
        """Other processes that will soon be taken for lost."""
        late = [rank for rank in self._beats() if self._silence(rank) > self.patience / 2]
        ended = {problem.rank for problem in self.problems() if problem.kind != "lost"} | {self.rank}
        return [rank for rank in dict.fromkeys(late + self._board[1]) if rank not in ended]

    def problems(self) -> list[Problem]:
        """Other processes that are missing, by rank 0's board and what was seen here; the worst first."""
        problems = {problem.rank: problem for problem in self._board[0]}
        for rank, beat in self._beats().items():
            if beat.error:
                kind, verb = ("follows", "ended") if beat.follows else ("failed", "failed")
                problems[rank] = Problem(rank, kind, f"{_who(rank, beat)} {verb}: {beat.error}")
            elif beat.left:
                problems[rank] = Problem(rank, "left", f"{_who(rank, beat)} has left the run")
            elif self._silence(rank) > self.patience:
                problems[rank] = self._lost(rank, beat)
        problems.pop(self.rank, None)
        return _worst_first(problems.values())

    def root_causes(self) -> list[Problem]:
        """Those that have failed or are missing, not those that ended because of them; the system is asked, too."""
        causes = {problem.rank: problem for problem in self.problems() if problem.kind in ("failed", "lost")}
        for rank, beat in self._beats().items():
            state = "" if rank in causes or rank == self.rank or beat.error or beat.left else state_of(beat)
            if state in ("gone", "stopped"):
                text = "has ended without a message" if state == "gone" else "does not answer (it is stopped)"
                causes[rank] = Problem(rank, "gone", f"{_who(rank, beat)} {text}")
        return _worst_first(causes.values())

    def suspects(self, seconds: float) -> list[Problem]:
        """While none is known to be missing: who has not answered for `seconds`, else who does not wait, else all."""
        beats = {rank: beat for rank, beat in self._beats().items() if rank != self.rank}
        mute = [self._lost(rank, beat) for rank, beat in beats.items() if self._silence(rank) >= seconds]
        busy = [Problem(rank, "slow", self.account(rank)) for rank in beats if not self._may_wait(rank)]
        return mute or busy or [Problem(rank, "slow", self.account(rank)) for rank in beats]

    def standing(self, seconds: float) -> tuple[dict[int, float], list[int]]:
        """Who has made no progress for `seconds`, with that time, and which of them may be waiting for others."""
        ended = {problem.rank for problem in self.problems()}
        stood = {rank: self._stood(rank) for rank in self._beats() if rank not in ended}
        stood = {rank: time for rank, time in stood.items() if time >= seconds}
        return stood, [rank for rank in stood if self._may_wait(rank)]

    def account(self, rank: int) -> str:
        """Where a process is, and for how long."""
        beat = self._beats()[rank]
        aside = "; it runs, but does not answer" if self._is_mute(rank) else ""
        return f"{_who(rank, beat)} has been for {self._stood(rank):.0f} s in {beat.place}{aside}"

    def first(self) -> str:
        """Rank 0, as far as is known, and whether it is stopped or gone."""
        beat = self._beats().get(0)
        return "rank 0" if beat is None else f"{_who(0, beat)}{_aside(beat)}"

    def first_has_left(self) -> bool:
        """Whether rank 0 has left, in good order or not."""
        beat = self._beats().get(0)
        return beat is not None and beat.left

    def all_have_heard(self) -> bool:
        """Whether all others that can answer know that rank 0 has left, or have left themselves."""
        return all(
            rank == self.rank or beat.heard or beat.left or self._silence(rank) > self.patience / 2
            or state_of(beat) in ("gone", "stopped")
            for rank, beat in self._beats().items()
        )  # fmt: skip

    def _beats(self) -> dict[int, Beat]:
        return {rank: seen.beat for rank, seen in list(self.seen.items()) if seen.beat is not None}

    def _silence(self, rank: int) -> float:
        """Seconds without a sign of this process while the store answered."""
        return self.answered - max(self.seen[rank].changed, self.grace_until)

    def _own_silence(self, rank: int) -> float:
        """Seconds without a beat that this process wrote itself, while the store answered."""
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
        return Problem(rank, "lost", f"{_who(rank, beat)} has not answered for {seconds:.0f} s{_aside(beat)}")


def read_beat(raw: bytes) -> Beat | None:
    """The beat that stands in the store; None before the first."""
    return Beat(*json.loads(raw)) if raw else None


def machine() -> tuple[str, int]:
    """Name of this machine, and the namespace in which its numbers of processes mean something (0: there is one)."""
    try:
        return socket.gethostname(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname(), 0


def state_of(beat: Beat) -> str:
    """What the system says of a process: "runs", "stopped" or "gone"; "" where it does not say."""
    if (beat.host, beat.namespace) != machine():
        return ""
    try:
        status = psutil.Process(beat.pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:  # it is hidden from this process
        return ""
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "runs"


def _who(rank: int, beat: Beat) -> str:
    return f"rank {rank} ({beat.host}, process {beat.pid})"


def _aside(beat: Beat) -> str:
    state = state_of(beat)
    return f" (it is {state})" if state in ("stopped", "gone") else ""


def _worst_first(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (_KINDS.index(problem.kind), problem.rank))

"""`Heartbeat`: finds processes of a run that are gone or hang, for which torch alone would wait half an hour."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.watchdog.peers import Beat, PeerTable, Problem, machine, read_beat, state_of
from trainer_kit.strategies.watchdog.stack import StackLocation, locate

logger = logging.getLogger("trainer_kit")

_URGENT_SECONDS = 0.05
_SUSPICIOUS_SECONDS = 1.0
_STOP_SECONDS = 2.0
_NAMED_AT_MOST = 4


class Heartbeat:
    """Watches over the processes of a run through a store that they share.

    Each process writes a beat every `interval` seconds, and every second while another one is silent. Rank 0 reads all
    beats and writes on a board who is missing; the others read its beat and the board. A process that waits in a
    collective for one that is missing says so in one sentence on stderr and ends with exit code 1: torch cannot break
    off a collective whose peer keeps its connection open. A process that cannot beat but runs, as others on its machine
    see, is only slow.

    One thread talks to the store, whose calls never return while its server is frozen; another one watches.

    Args:
        store: A client of its own: the process group's may be in use by a main thread that waits.
        rank: Number of this process.
        world_size: Processes in all.
        interval: Seconds between two beats, at most a quarter of `patience`.
        patience: Seconds without an answer after which a process is lost.
        slow: Seconds without progress after which a process that others wait for is named in a warning.

    Attributes:
        calls: Progress: the strategy adds 1 for each of its calls.
        steps: Optimizer steps of this start; the strategy counts.
        last_duty: Called before this process is ended where it stands.
        leaving: Whether some process has announced that it leaves.
        error: What this process has told the others of the error by which it ends; empty without one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        interval: float = 5.0,
        patience: float = 30.0,
        slow: float = 60.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.interval, self.patience, self.slow = min(interval, patience / 4), patience, slow
        self.calls = self.steps = 0
        self.last_duty: Callable[[], object] | None = None
        self.leaving = False
        self._round = 0  # a process that lives on may train again
        self._store = store
        self._roster = PeerTable(rank, patience)
        self._threads: list[threading.Thread] = []
        self._process = self._watched = 0  # numbers of this process and of the thread that is watched
        self._wishes: queue.SimpleQueue[None] = queue.SimpleQueue()  # unlike an Event, fit for signal handlers
        self._done = threading.Event()
        # What the beats say.
        self._beats = self._exchanged = 0
        self._announces = self._left = self._follows = self._heard = self._urgent = self._hung_up = False
        self.error = ""
        # What this process is doing.
        self._where = StackLocation()
        self._failed_in: StackLocation | None = None
        self._excused = False
        self._progress = (0, False)
        self._moved = self._looked = time.monotonic()
        # What the threads remember.
        self._created: set[str] = set()
        self._board = ""
        self._known: dict[tuple[int, str], float] = {}
        self._warn_after: dict[int, float] = {}
        self._error_before = _uncaught_error()

    # What the strategy calls

    def start(self) -> None:
        """Starts to watch over the run, and over the calling thread as this process's main one."""
        self._process, self._watched = os.getpid(), threading.get_ident()
        self._moved = self._looked = self._roster.answered = self._roster.grace_until = time.monotonic()
        self._wishes.put(None)
        for target in (self._talk, self._watch):
            self._threads.append(threading.Thread(target=target, name="trainer_kit heartbeat", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Tells the others that this process leaves, and by which error where there is an uncaught one."""
        if not self._runs_here():
            return
        self._excused = True
        error = _uncaught_error()
        if error is not None and error is not self._error_before and not self.error:
            self.report_failure(error)
        self._left = True
        self._let_others_hear()
        self._done.set()
        self._wishes.put(None)
        for thread in self._threads:
            thread.join(_STOP_SECONDS)  # a store that does not answer keeps its thread for ever
        self._threads = []

    def announce_leaving(self) -> None:
        """Tells all processes that this one was told to leave; may be called in a signal handler."""
        self.leaving = self._announces = True
        self._wishes.put(None)

    def next_round(self) -> None:
        """A training is over: who announced that it leaves meant that one. All processes call it as often."""
        self._round += 1
        self.leaving = self._announces = False

    def take_back_failure(self) -> None:
        """The error that this process reported was caught: it goes on."""
        self.error, self._follows = "", False
        if self._runs_here():
            self._publish()

    def report_failure(self, error: BaseException) -> None:
        """Tells the others by which error this process ends."""
        self._follows = isinstance(error, LostProcessError)
        text = str(error).partition(f"; rank {self.rank} (this process)")[0]
        self.error = text if self._follows else f"{type(error).__name__}: {text[:1000]}".rstrip(": ")
        if self._runs_here():
            self._publish()

    def explain(self, error: BaseException) -> str:
        """Why a collective of this process has failed; waits a few seconds for what is known of the others.

        Returns:
            One sentence: which processes are missing, what they said themselves, and where this one waited.
        """
        if not self._runs_here():
            return str(error)
        self._failed_in = self._where = locate(sys._getframe(), error, hidden=__file__)
        self._urgent = True
        limit = 2 * self.interval + 1
        try:
            self._publish()
            _wait_until(lambda: bool(self._roster.root_causes()), limit)
            self._publish()  # a process that is gone may have said why in the meantime
            problems = self._roster.root_causes() or self._roster.problems()
            if not problems and self._store_silence() >= limit:
                problems = [self._store_problem()]
            return self._sentence(problems or self._roster.suspects(2 * self.interval), error)
        finally:
            self._failed_in = None
            self._urgent = False

    # The thread that talks to the store

    def _talk(self) -> None:
        last = False
        while not last:
            with contextlib.suppress(queue.Empty):
                self._wishes.get(timeout=min(self.interval, _URGENT_SECONDS) if self._urgent else self._pause())
            last = self._done.is_set()
            self._beats += 1
            try:
                if not self._hung_up:
                    self._exchange()
            except RuntimeError as error:  # the other thread finds out whether it matters
                logger.debug("the rendezvous store: %s", error)
                self._hung_up = not isinstance(error, dist.DistStoreError)  # torch prints a trace for each attempt
            self._exchanged = self._beats

    def _exchange(self) -> None:
        store, roster = self._store, self._roster
        store.set(_key(self.rank), json.dumps(self._beat()))
        if self._announces:
            store.set("leaving", str(self._round))
            self._announces = False
        ranks = range(self.world_size if self.rank == 0 or self._urgent else 1)
        keys = ["leaving", "board", *map(_key, ranks)]
        for key in keys:
            if key not in self._created:
                store.compare_set(key, "", "")  # to read what is not there would be to wait for it
                self._created.add(key)
        leaving, board, *beats = store.multi_get(keys)
        if time.monotonic() - roster.answered > 2 * self.interval:
            roster.grace_until = time.monotonic()  # this process was stopped, or the store was: nobody else is to blame
        roster.take_in(dict(zip(ranks, beats, strict=True)), board)
        self.leaving = self.leaving or leaving.decode() == str(self._round)
        if self.rank == 0:
            if self._board != (board_now := roster.board()):
                store.set("board", board_now)
                self._board = board_now
            self._warn_of_slow()
        for rank in roster.silent():
            self._confirm_alive(rank)
        if self._heard:
            self._hung_up = not _agent_serves()
        elif self.rank != 0 and roster.first_has_left():
            self._heard = True
            self._wishes.put(None)  # where rank 0 serves the store, it waits for this last word before it is gone

    def _beat(self) -> Beat:
        # Up to the last look, which finds out whether this process was stopped: that is no idleness.
        where, idle = self._where, max(0.0, self._looked - max(self._moved, self._roster.grace_until))
        return Beat(
            self._beats, *machine(), self._process, where.place, where.waits, idle, self._left, self.error,
            self._follows, self._heard,
        )  # fmt: skip

    def _confirm_alive(self, rank: int) -> None:
        """Beats for a process of this machine that runs but cannot: C code may hold its interpreter for minutes."""
        (raw,) = self._store.multi_get([_key(rank)])
        beat = read_beat(raw)
        if beat is not None and state_of(beat) == "runs":
            vouched = json.dumps(beat._replace(vouched=beat.vouched + 1))
            self._store.compare_set(_key(rank), raw.decode(), vouched)  # never over a newer one of its own

    def _warn_of_slow(self) -> None:
        """Names a process that makes no progress while others wait; again after twice the time."""
        stood, waiting = self._roster.standing(self.slow)
        self._warn_after = {rank: seconds for rank, seconds in self._warn_after.items() if rank in stood}
        for rank, seconds in stood.items():
            if waiting and rank not in waiting and seconds >= self._warn_after.get(rank, self.slow):
                self._warn_after[rank] = 2 * seconds
                logger.warning("%s, while %s", self._roster.account(rank), self._roster.account(waiting[0]))

    # The thread that watches

    def _watch(self) -> None:
        while not self._done.wait(self._pause()):
            self._look()
            sentence = self._finding()
            if sentence is not None and not self._excused and self._failed_in is None:
                self._end(sentence)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > 2 * self.interval:
            self._roster.grace_until = now  # this process was stopped, for all that it knows with all others
        self._looked = now
        self._where = self._failed_in or locate(sys._current_frames().get(self._watched), hidden=__file__)
        if (self.calls, self._where.waits) != self._progress:
            self._progress, self._moved = (self.calls, self._where.waits), now

    def _finding(self) -> str | None:
        """The sentence with which this process ends where it waits for what will never come."""
        now, problems = time.monotonic(), self._roster.problems()
        self._known = {problem[:2]: self._known.get(problem[:2], now) for problem in problems}
        stood = now - max(self._moved, self._roster.grace_until)
        if self._where.waits and not self._heard and min(stood, self._store_silence()) >= self.patience:
            return self._sentence([self._store_problem()])
        # The connections of one that has failed break soon, which raises here: better than to end like this.
        delays = {"lost": self.interval, "failed": 2 * self.interval, "follows": 2 * self.interval}
        if self._where.waits:
            delays["left"] = self.patience
        elif not self._where.inside or stood < self.patience:
            return None
        ripe = [
            problem
            for problem in problems
            if problem.kind in delays and min(stood, now - self._known[problem[:2]]) >= delays[problem.kind]
        ]
        return self._sentence(ripe) if ripe else None

    def _end(self, sentence: str) -> None:
        self.error, self._follows = sentence.partition(f"; rank {self.rank} (this process)")[0], True
        self._left = True
        self._publish()
        self._let_others_hear()
        if self._excused or self._failed_in is not None:
            return  # the collective has failed in the meantime: its exception is the better end
        if self.last_duty is not None:
            self.last_duty()
        flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold what this needs
        flushing.start()
        flushing.join(_STOP_SECONDS)
        _tell_launcher(sentence)
        with contextlib.suppress(OSError):
            os.write(2, f"{sentence}\n".encode())
        os._exit(1)

    # What both need

    def _pause(self) -> float:
        """Seconds until the next beat and look: few while a process is silent, whose end then goes by several steps."""
        return min(self.interval, _SUSPICIOUS_SECONDS) if self._roster.silent() else self.interval

    def _runs_here(self) -> bool:
        """Whether there is a thread to talk; a forked child has none."""
        return bool(self._threads) and self._threads[0].is_alive()

    def _publish(self) -> None:
        """Waits until the others can read what this process has to say now, and this one has read them."""
        count = self._beats + 1  # the exchange under way may have begun before
        self._wishes.put(None)
        _wait_until(lambda: self._exchanged >= count, _STOP_SECONDS)

    def _let_others_hear(self) -> None:
        """Where rank 0 serves the store, it waits until all others know that it leaves, and why."""
        if self.rank == 0 and not _agent_serves():
            self._urgent = True
            self._wishes.put(None)
            _wait_until(self._roster.all_have_heard, 2 * self.interval)

    def _store_silence(self) -> float:
        return time.monotonic() - max(self._roster.answered, self._roster.grace_until)

    def _store_problem(self) -> Problem:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        where = f"{store.host}:{store.port}" if hasattr(store, "host") and hasattr(store, "port") else "of this run"
        seconds = time.monotonic() - self._roster.answered
        server = "" if _agent_serves() else f"; it is served by {self._roster.first()}"
        return Problem(0, "lost", f"the rendezvous store at {where} has not answered for {seconds:.0f} s{server}")

    def _sentence(self, problems: list[Problem], error: BaseException | None = None) -> str:
        roots = [problem for problem in problems if problem.kind not in ("follows", "left")]
        texts = [problem.text for problem in roots or problems]
        if len(texts) > _NAMED_AT_MOST:
            texts[_NAMED_AT_MOST:] = [f"and {len(texts) - _NAMED_AT_MOST} more"]
        cause = "; ".join(texts) or f"no process is known to be missing ({error})"
        verb = "waited" if self._where.waits else "was"
        return f"{cause}; rank {self.rank} (this process) {verb} in {self._where.place}, after {self.steps} steps"


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _agent_serves() -> bool:
    """Whether torchrun's agent serves the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _uncaught_error() -> BaseException | None:
    """The error by which the interpreter's main program has ended."""
    return getattr(sys, "last_value", None)


def _wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    logging.shutdown()


def _tell_launcher(sentence: str) -> None:
    """Writes the error file of torchrun's agent, which prints what stands in it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = f"{LostProcessError.__name__}: {sentence}"
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)

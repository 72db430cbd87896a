"""`Heartbeat`: detects ended and hung processes of a run, for which torch alone would wait half an hour."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.watchdog.last_words import leave_with
from trainer_kit.strategies.watchdog.mailbox import Mailbox, Message
from trainer_kit.strategies.watchdog.peers import Beat, PeerTable, Problem, machine, read_beat, state_of
from trainer_kit.strategies.watchdog.stack import StackLocation, locate
from trainer_kit.utils.units import format_duration

logger = logging.getLogger("trainer_kit")

_URGENT_SECONDS = 0.05
_SUSPICIOUS_SECONDS = 1.0
_MAIL_SECONDS = 0.05
_STOP_SECONDS = 2.0
_NAMED_AT_MOST = 4


class Heartbeat:
    """Monitor of a run's processes through a shared store.

    Each process writes a beat every `interval` seconds, and every second while another one is silent. Rank 0 reads all
    beats and publishes the missing processes on a board. The other processes read rank 0's beat and the board. A
    process that waits in a collective for a missing one prints one sentence to stderr and exits with code 1, since
    torch cannot abort a collective whose peer keeps its connection open. A process that cannot write beats counts as
    slow, not lost, if another process on its machine sees it run.

    One thread talks to the store, whose calls do not return while its server is frozen. A second thread watches.

    Args:
        store: A separate client: a waiting main thread may occupy the process group's.
        rank: Rank of this process.
        world_size: Number of processes.
        interval: Seconds between two beats; reduced to a quarter of `patience` if larger.
        patience: Seconds without an answer after which a process counts as lost.
        slow: Seconds without progress after which a warning names a process that others wait for.
        explains_for: Seconds to look for the cause of a failed collective; None: two beats and a second.

    Attributes:
        calls: Progress counter, which the strategy increments in each of its calls.
        steps: Optimizer steps since this start, counted by the strategy.
        last_duty: Called before the watching thread ends this process, and before others learn of it; None: nothing.
        break_off: Wakes the collective that waits, by an error, before the watching thread ends this process; None:
            it cannot be woken.
        leaving: Whether any process has announced that it leaves the run.
        error: The error by which this process ends, as reported to the others; empty without one.
        round: Number of trainings that have ended.
        peers: State of the other processes.
        urgent: Whether this process reads the beats of all others, many times a second.
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
        explains_for: float | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.interval, self.patience, self.slow = min(interval, patience / 4), patience, slow
        self._explains_for = 2 * self.interval + 1 if explains_for is None else explains_for
        self._names_suspects = explains_for is None
        self.calls = self.steps = 0
        self.last_duty: Callable[[], object] | None = None
        self.break_off: Callable[[], object] | None = None
        self.leaving = False
        self.round = 0
        self.urgent = False
        self._store = store
        self.peers = PeerTable(rank, patience)
        self._threads: list[threading.Thread] = []
        self._process = self._watched = 0  # PID, and ident of the watched thread
        self._wishes: queue.SimpleQueue[None] = queue.SimpleQueue()  # safe in signal handlers, unlike an Event
        self._mail = Mailbox(lambda: self._wishes.put(None), self._has_lost_store)
        self._done = threading.Event()
        # Content of the beats.
        self._beats = self._exchanged = 0
        self._announces = self._left = self._follows = self._heard = self._hung_up = False
        self.error = ""
        # Activity of this process.
        self._where = StackLocation()
        self._failed_in: StackLocation | None = None
        self._excused = False
        self._progress = (0, False)
        self._moved = self._looked = time.monotonic()
        # State of the threads.
        self._created: set[str] = set()
        self._board = ""
        self._known: dict[tuple[int, str], float] = {}
        self._warn_after: dict[int, float] = {}
        self._error_before = _uncaught_error()

    # Calls of the strategy

    def start(self) -> None:
        """Start the threads, which watch the run, and the calling thread as this process's main thread."""
        self._process, self._watched = os.getpid(), threading.get_ident()
        self._moved = self._looked = self.peers.answered = self.peers.grace_until = time.monotonic()
        self._wishes.put(None)
        for target in (self._talk, self._watch):
            self._threads.append(threading.Thread(target=target, name="trainer_kit heartbeat", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Report that this process leaves, with its uncaught error if there is one, and stop the threads."""
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
            thread.join(_STOP_SECONDS)  # a store that does not answer blocks its thread
        self._threads = []

    def announce_leaving(self) -> None:
        """Announce to all processes that this one was asked to leave; safe in a signal handler."""
        self.leaving = self._announces = True
        self._wishes.put(None)

    def next_round(self) -> None:
        """Begin the next training, which earlier announcements do not concern; all processes call it equally often."""
        self.round += 1
        self.leaving = self._announces = False

    def take_back_failure(self) -> None:
        """Retract the reported error, which the program has caught."""
        self.error, self._follows = "", False
        if self._runs_here():
            self._publish()

    def report_failure(self, error: BaseException) -> None:
        """Report the error by which this process ends to the other processes."""
        self._follows = isinstance(error, LostProcessError)
        text = str(error).partition(f"; rank {self.rank} (this process)")[0]
        self.error = text if self._follows else f"{type(error).__name__}: {text[:1000]}".rstrip(": ")
        if self._runs_here():
            self._publish()

    def explain(self, error: BaseException) -> str:
        """Return why a collective of this process failed; waits a few seconds for reports of the others.

        Args:
            error: The error that the collective raised.

        Returns:
            One sentence: the missing processes, their own reports, and where this process waited.
        """
        if not self._runs_here():
            return str(error)
        self._failed_in = self._where = locate(sys._getframe(), error, hidden=__file__)
        self.urgent = self._follows = True
        limit = self._explains_for
        try:
            self._publish()
            _wait_until(lambda: bool(self.peers.root_causes()), limit)
            self._publish()  # an ended process may have reported why in the meantime
            problems = self.peers.root_causes() or self.peers.problems()
            if not problems and self._store_silence() >= max(limit, self.interval):
                problems = [self._store_problem()]
            if not problems and self._names_suspects:
                problems = self.peers.suspects(2 * self.interval)
            return self._sentence(problems, error)
        finally:
            self._failed_in = None
            self.urgent = False

    def give_up(self, error: BaseException, problems: Sequence[Problem] = (), frame: FrameType | None = None) -> str:
        """Return where a collective of this process failed, without a search for the cause; ends nothing from then on.

        Args:
            error: The error that the collective raised.
            problems: What is known of the cause.
            frame: Where this process noticed it; None: in the collective.
        """
        self._excused = self._follows = True
        if self._runs_here():
            self._where = locate(frame or sys._getframe(), error, hidden=__file__)
        return self._sentence([*problems], error)

    def send(self, key: str, text: str) -> bool:
        """Send a message to the process that receives `key`; any thread may call it.

        Args:
            key: Name of the message, used once in a run.
            text: The message.

        Returns:
            Whether it is sent; False if the store does not answer any more.
        """
        return self._mail.send(Message(key, self.rank, text))

    def receive(self, key: str, rank: int) -> str | None:
        """Wait on rank 0 for a message that another process sends; any thread may call it.

        Args:
            key: Name of the message.
            rank: Rank of the sender.

        Returns:
            The message; None if its sender has left the run, has failed, has ended or does not answer.
        """
        return self._mail.receive(key, rank)

    # The thread that talks to the store

    def _talk(self) -> None:
        last = False
        while not last:
            self._wait_for_wish()
            last = self._done.is_set()
            self._beats += 1
            self._call_store(self._exchange)
            self._exchanged = self._beats

    def _wait_for_wish(self) -> None:
        """Wait until an exchange is due or requested; meanwhile look for the messages that threads wait for."""
        due = time.monotonic() + (min(self.interval, _URGENT_SECONDS) if self.urgent else self._pause())
        while (seconds := due - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._wishes.get(timeout=min(seconds, _MAIL_SECONDS) if self._mail.is_waiting else seconds)
                return
            if self._mail.is_waiting:
                self._call_store(self._serve_mail)

    def _call_store(self, exchange: Callable[[], object]) -> None:
        try:
            if not self._hung_up:
                exchange()
        except RuntimeError as error:  # the watching thread decides whether it matters
            logger.debug("the rendezvous store: %s", error)
            self._hung_up = not isinstance(error, dist.DistStoreError)  # torch prints a trace for each attempt

    def _serve_mail(self) -> None:
        self._mail.serve(self._store, self.peers.is_missing)

    def _exchange(self) -> None:
        store, roster = self._store, self.peers
        self._serve_mail()  # before the beat, which may say that this process leaves
        store.set(_key(self.rank), json.dumps(self._beat()))
        if self._announces:
            store.set("leaving", str(self.round))
            self._announces = False
        ranks = range(self.world_size if self.rank == 0 or self.urgent else 1)
        keys = ["leaving", "board", *map(_key, ranks)]
        for key in keys:
            if key not in self._created:
                store.compare_set(key, "", "")  # reading a missing key would block
                self._created.add(key)
        leaving, board, *beats = store.multi_get(keys)
        if time.monotonic() - roster.answered > 2 * self.interval:
            roster.grace_until = time.monotonic()  # this process or the store was stopped
        roster.take_in(dict(zip(ranks, beats, strict=True)), board)
        self.leaving = self.leaving or leaving.decode() == str(self.round)
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
            self._wishes.put(None)  # rank 0, if it serves the store, waits for this beat

    def _beat(self) -> Beat:
        # Idle until the last look, which detects whether this process was stopped: that is no idleness.
        where, idle = self._where, max(0.0, self._looked - max(self._moved, self.peers.grace_until))
        return Beat(
            self._beats, *machine(), self._process, where.place, where.waits, idle, self._left, self.error,
            self._follows, self._heard,
        )  # fmt: skip

    def _confirm_alive(self, rank: int) -> None:
        """Write a beat for a running process of this machine, whose GIL C code may hold for minutes."""
        (raw,) = self._store.multi_get([_key(rank)])
        beat = read_beat(raw)
        if beat is not None and state_of(beat) == "runs":
            vouched = json.dumps(beat._replace(vouched=beat.vouched + 1))
            self._store.compare_set(_key(rank), raw.decode(), vouched)  # does not overwrite a newer beat

    def _warn_of_slow(self) -> None:
        """Warn of a process without progress that others wait for, and again after twice the time."""
        stood, waiting = self.peers.standing(self.slow)
        self._warn_after = {rank: seconds for rank, seconds in self._warn_after.items() if rank in stood}
        for rank, seconds in stood.items():
            if waiting and rank not in waiting and seconds >= self._warn_after.get(rank, self.slow):
                self._warn_after[rank] = 2 * seconds
                logger.warning("%s, while %s", self.peers.account(rank), self.peers.account(waiting[0]))

    # The thread that watches

    def _watch(self) -> None:
        while not self._done.wait(self._pause()):
            self._look()
            sentence = self._finding()
            if sentence is not None and not self._is_excused():
                self._end(sentence)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > 2 * self.interval:
            self.peers.grace_until = now  # this process was stopped, maybe with all others
        self._looked = now
        self._where = self._failed_in or locate(sys._current_frames().get(self._watched), hidden=__file__)
        if (self.calls, self._where.waits) != self._progress:
            self._progress, self._moved = (self.calls, self._where.waits), now

    def _finding(self) -> str | None:
        """Return the sentence with which this process ends if it waits for a missing process; None if it does not."""
        now, problems = time.monotonic(), self.peers.problems()
        self._known = {problem[:2]: self._known.get(problem[:2], now) for problem in problems}
        stood = now - max(self._moved, self.peers.grace_until)
        if self._where.waits and not self._heard and min(stood, self._store_silence()) >= self.patience:
            return self._sentence([self._store_problem()])
        # Connections of a failed process break soon, which raises an exception here: better than to exit.
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
        if self.break_off is not None:
            self.break_off()
            _wait_until(self._is_excused, _STOP_SECONDS)
        if self._is_excused():
            return
        if self.last_duty is not None:
            self.last_duty()  # first: the others wait for what it sends until this process announces that it leaves
        if self._is_excused():
            return
        self.error, self._follows = sentence.partition(f"; rank {self.rank} (this process)")[0], True
        self._left = True
        self._publish()
        self._let_others_hear()
        if self._is_excused():
            return
        leave_with(sentence)

    def _is_excused(self) -> bool:
        """Return whether the collective has raised in the meantime, which is better than to exit."""
        return self._excused or self._failed_in is not None

    # Shared by both threads

    def _pause(self) -> float:
        """Return the seconds until the next beat and look: at most one while another process is silent."""
        return min(self.interval, _SUSPICIOUS_SECONDS) if self.peers.silent() else self.interval

    def _runs_here(self) -> bool:
        """Return whether the threads run in this process; a forked child has none."""
        return bool(self._threads) and self._threads[0].is_alive()

    def _publish(self) -> None:
        """Wait until an exchange with the store that begins now is complete, for at most two seconds."""
        count = self._beats + 1  # the current exchange may have begun earlier
        self._wishes.put(None)
        _wait_until(lambda: self._exchanged >= count, _STOP_SECONDS)

    def _let_others_hear(self) -> None:
        """Wait until all others know that rank 0 leaves, if this is rank 0 and it serves the store."""
        if self.rank == 0 and not _agent_serves():
            self.urgent = True
            self._wishes.put(None)
            _wait_until(self.peers.all_have_heard, 2 * self.interval)

    def _store_silence(self) -> float:
        return time.monotonic() - max(self.peers.answered, self.peers.grace_until)

    def _has_lost_store(self) -> bool:
        return self._hung_up or not self._runs_here() or self._store_silence() >= self.patience

    def _store_problem(self) -> Problem:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        where = f"{store.host}:{store.port}" if hasattr(store, "host") and hasattr(store, "port") else "of this run"
        seconds = time.monotonic() - self.peers.answered
        server = "" if _agent_serves() else f"; it is served by {self.peers.first()}"
        return Problem(
            0, "lost", f"the rendezvous store at {where} has not answered for {format_duration(seconds)}{server}"
        )

    def _sentence(self, problems: list[Problem], error: BaseException | None = None) -> str:
        roots = [problem for problem in problems if problem.kind not in ("follows", "left")]
        texts = [problem.text for problem in roots or problems]
        if len(texts) > _NAMED_AT_MOST:
            texts[_NAMED_AT_MOST:] = [f"and {len(texts) - _NAMED_AT_MOST} more"]
        cause = "; ".join(texts) or f"a connection to another process broke ({_short(error)})"
        verb = "waited" if self._where.waits else "was"
        return f"{cause}; rank {self.rank} (this process) {verb} in {self._where.place}, after {self.steps} steps"


def _short(error: BaseException | None) -> str:
    """Return an error of gloo without the place in its source and its advice."""
    return re.sub(r"^\[[^]]*\.\w+:\d+\] ", "", str(error)).partition(". This is typically")[0]


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _agent_serves() -> bool:
    """Return whether torchrun's agent serves the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _uncaught_error() -> BaseException | None:
    """Return the error that ended the interpreter's main program; None without one."""
    return getattr(sys, "last_value", None)


def _wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)

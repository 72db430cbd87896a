"""`Agent`: torchrun's elastic agent with its own handling of failures, signals and restarts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext

from trainer_kit.config import environment
from trainer_kit.errors import ProcessesLeft, ProcessFailed
from trainer_kit.launch.elastic_rendezvous import ElasticRendezvous
from trainer_kit.launch.failures import Failure, follows_loss, summary
from trainer_kit.launch.link import IsNewcomerError, RunEndedError
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.newcomer import Newcomer, Outlook
from trainer_kit.launch.news import Change, News
from trainer_kit.launch.output import OutputFiles
from trainer_kit.launch.places import expect_place, variables_of
from trainer_kit.launch.rank_processes import RankProcesses, newest_step
from trainer_kit.launch.restart_limit import FailureHistory, PastFailure, RestartLimit
from trainer_kit.strategies.session import REPLACE
from trainer_kit.utils.new_place import NEW, clear, give_place, open_for, set_joining, waiting

# When a machine joins or leaves, one launcher signals its ranks, and the ranks of a Trainer agree to leave. Those of
# another program get a signal from each launcher after this time.
_AGREEING_SECONDS = 10.0
_ANSWERED_SECONDS = 3.0  # for ranks that wait for a place and get none to end by themselves


class Agent(LocalElasticAgent):
    """Starts the ranks of this machine, watches them, and restarts them where that makes sense.

    It differs from torch's agent in four ways. It forwards a signal to the launcher once and then waits. Ranks that
    exit with code 143 or 130 have not failed. The first failure is the earliest one, whatever happened to the other
    ranks at the same time. A run that makes progress is restarted more often than `max_restarts`. All machines act
    alike.

    Args:
        spec: What to start.
        limit: Number of failures after which the ranks are restarted.
        output: Files that the ranks write to.
        start_method: How processes that run a function are started.
        machines: Channel to the agents of the other machines.
        signals: Signals to this process that the agent has not handled yet; any thread may append to it.
        say: Shows a sentence to the user.

    Attributes:
        signals: The argument of the same name.
        has_started: Whether ranks have been started.
        exit_code: 143 or 130 after the ranks have left; None otherwise.
        remedies: Advice after a rank was killed by a signal, by exit code.
        failed: The failure that ended the run; None if there is none.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        limit: RestartLimit,
        output: OutputFiles,
        start_method: str,
        machines: Machines,
        signals: deque[int],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spec, output, start_method, log_line_prefix_template=output.prefix)
        self._limit = limit
        self._failures = FailureHistory(limit)
        self._progress_file = output.scratch / "progress"
        self._scratch = output.scratch
        self._stays = self._has_met = self._is_preparing = False
        self._starts = 0
        self._machines = machines
        self._say = say
        self._newcomer: Newcomer | None = None
        if environment.regroup_folder() is not None and isinstance(machines.rendezvous, ElasticRendezvous):
            self._newcomer = Newcomer(machines.rendezvous, say)
        self._passed_on: int | None = None
        self._is_told = self._leaves_alone = False
        self._change: Change | None = None
        self._signal_at = 0.0
        self._step_at_start: int | None = None
        self.signals = signals
        self.has_started = False
        self.exit_code: int | None = None
        self.remedies: Mapping[int, str] = {}
        self.failed: ProcessFailed | None = None

    @property
    def workers(self) -> list[Worker]:
        """Ranks of this machine."""
        return list(self._worker_group.workers)

    def values(self) -> dict[int, Any]:
        """Return the values of the ranks' functions, by global rank."""
        files = {worker.global_rank: self._ranks.value_file(worker.local_rank) for worker in self.workers}
        # A newcomer's ranks have none if the run has ended before they had a place.
        return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}

    def _invoke_run(self, *args: Any) -> RunResult:
        try:
            return super()._invoke_run(*args)
        except RunEndedError as end:
            if isinstance(end.error, ProcessesLeft):
                self._say("the processes of the other machines have left because of a signal")
            raise end.error from None

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Start the ranks: those of a newcomer before it meets the other machines."""
        while True:
            running = None if self._newcomer is None or self._has_met else self._newcomer.begin()
            if running is not None:
                self._is_preparing = True
                self._machines.leave()
                expect_place(worker_group, running)
                self._starts = running.membership.number
                self._remaining_restarts = worker_group.spec.max_restarts - self._starts
                os.environ[environment.MEMBERSHIP] = ""
            # The run may have begun without this machine, which waits for a place and becomes a newcomer.
            with contextlib.suppress(IsNewcomerError):
                super()._initialize_workers(worker_group)
                return

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines, unless the ranks start before that.

        Raises:
            ProcessFailed: If a failure has ended the run, which this machine may have missed on its way.
        """
        rendezvous = self._machines.rendezvous
        if self._is_preparing:
            return
        if self._has_met:  # before the ranks ended
            self._has_met, self._remaining_restarts = False, worker_group.spec.max_restarts - self._starts
            return
        self._change, self._is_told = None, self._passed_on is not None
        words, missed_end = self._words(), self._machines.missed_end()
        rendezvous.stays = bool(words[-1])
        while True:
            self._store = worker_group.store = None  # the old one must be gone before a new one can take its port
            self._machines.leave()
            try:
                super()._rendezvous(worker_group)
                assert worker_group.store is not None
                self._machines.join(worker_group.store, worker_group.group_rank, worker_group.group_world_size)
                own = json.dumps((*words, rendezvous.starts, missed_end()))
                words_of_all = [json.loads(text) for text in self._machines.gather(own)]
                break
            except (DistStoreError, DistNetworkError):  # a machine or the store was lost after the meeting
                if not rendezvous.is_lasting:
                    raise
        # A machine that joined later has counted less, but all ranks must get the same number.
        starts, histories, left, memberships, ends = zip(*words_of_all, strict=True)
        for end in filter(None, ends):
            raise News.from_json(end).failure
        rendezvous.report()
        self._failures.merge(histories)
        memberships_left = {words for words in left if not words.startswith(NEW)}
        self._stays = len(memberships_left) == 1 and "" not in memberships_left
        rendezvous.confirm()
        os.environ[environment.MEMBERSHIP] = rendezvous.membership
        self._starts = max(*starts, *memberships)
        self._remaining_restarts = worker_group.spec.max_restarts - self._starts

    def _words(self) -> tuple[int, list[PastFailure], str]:
        """Return how often the ranks have started, the known failures, and what waiting ranks have left (else "")."""
        starts = self._worker_group.spec.max_restarts - self._remaining_restarts
        return starts, self._failures.past(), self._left() or ""

    # Ranks that continue without others

    def _left(self) -> str | None:
        """Return the membership that all ranks of this machine have left while they wait for a new place.

        None if some do not wait; the words of newcomers, which have left none.
        """
        if environment.regroup_folder() is None or self._pcontext is None:
            return None
        left, codes = waiting(self._scratch), self._ranks.exit_codes()
        if codes.keys() != left.keys() or any(code is not None for code in codes.values()):
            return None
        return left[0] if len(set(left.values())) == 1 else ""

    def _guide_newcomers(self, worker_group: WorkerGroup) -> RunResult | None:
        """Let ranks that have prepared join the others, or all start again; return None as long as they continue."""
        assert self._newcomer is not None
        if self._passed_on is not None or set(self._ranks.exit_codes().values()) != {None}:
            self._newcomer.withdraw()
            if self._passed_on is None and waiting(self._scratch):  # in vain, since another one has ended
                self.signals.append(signal.SIGTERM)
            return None
        outlook = self._newcomer.outlook(self._left())
        if outlook is Outlook.STAY:
            return None
        self._is_preparing = False
        if outlook is Outlook.JOIN:
            return self._regroup(worker_group)
        self._restart_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _regroup(self, worker_group: WorkerGroup) -> RunResult:
        """Meet the machines that are left, and give the ranks of this one their new places."""
        pids, otherwise = {worker.local_rank: worker.id for worker in self.workers}, None
        try:
            self._rendezvous(worker_group)
            self._has_met = not self._stays
        except IsNewcomerError:  # their state is old
            self._stays = self._machines.rendezvous.stays = False
            otherwise = dict[str, str]()
            assert self._newcomer is not None
            self._newcomer.withdraw()
        set_joining(self._scratch, False)
        for worker in worker_group.workers:
            worker.id = pids[worker.local_rank]
            place = variables_of(worker, worker_group, self._starts) if self._stays else otherwise
            give_place(self._scratch, worker.local_rank, place)
        self._announce_leaving()  # the ranks may obey a signal only now
        if self._stays:
            self._serve_newcomers()  # others may come just now
            return RunResult(state=WorkerState.HEALTHY)
        self._ranks.wait(_ANSWERED_SECONDS)
        return self._end(goes_on=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.signals:
            raise InterruptedError("a signal came before the processes were started")
        self.has_started, self._is_told, self.failed = True, False, None
        clear(self._scratch)
        self._step_at_start = newest_step(self._progress_file)
        if hasattr(signal, "pthread_sigmask") and not isinstance(worker_group.spec.entrypoint, str):
            # A new process inherits the mask, which holds Ctrl-C back until `Function` can handle it.
            if self._start_method != "fork":
                resource_tracker.ensure_running()  # would unblock it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ[environment.NEWCOMER] = "1" if self._is_preparing else ""
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._serve_signals():
            return self._end(goes_on=False)
        codes = self._ranks.exit_codes()  # read once: a rank may fail between two questions
        if any(self._ranks.is_failed(*rank, self._sent) for rank in codes.items()):
            return self._end_after(self._first_failure())
        news = self._machines.news()
        if news is not None:
            self._ranks.close(signal.SIGTERM)
            return self._follow(news)
        if self._is_preparing:
            if (joined := self._guide_newcomers(worker_group)) is not None:
                return joined
        elif self._left() is not None:
            return self._regroup(worker_group)
        endings = [self._ranks.ending(*rank) for rank in codes.items()]
        if None in endings:
            self._serve_change()
            self._serve_replacement()
            self._serve_newcomers()
            return RunResult(state=WorkerState.HEALTHY)
        if any(endings):
            if self._is_changing():
                return self._end(goes_on=True)
            self.exit_code = self._leaving_code(endings)
            self._exit_barrier()
            return self._end(goes_on=False)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        if not self._machines.rendezvous.is_lasting:  # else the rendezvous waits for the machines that are alive
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    # Signals

    def _serve_signals(self) -> bool:
        """Forward the first signal, kill the ranks at a second one, and return whether they were killed."""
        while self.signals:
            number = self.signals.popleft()
            if self._passed_on is not None:
                self._ranks.close(signal.SIGKILL)
                self.exit_code = self._leaving_code([])
                return True
            # A rank has no terminal of its own, so a hangup means nothing to it.
            self._passed_on = signal.SIGTERM if number == getattr(signal, "SIGHUP", None) else number
            self._announce_leaving()
            self._tell(self._passed_on)
        return False

    def _tell(self, number: int) -> None:
        """Send the ranks their first signal; at a second one they would end without a save."""
        if not self._is_told:
            self._is_told = True
            self._ranks.send(number)

    def _announce_leaving(self) -> None:
        """Announce that this machine leaves, if a signal to its ranks says so; Ctrl-C ends the run."""
        if self._passed_on not in (None, signal.SIGINT):
            self._leaves_alone = self._machines.announce_leaving(socket.gethostname())

    def _serve_change(self) -> None:
        """Let the ranks save and leave when a machine joins or leaves."""
        if self._passed_on is not None:
            return
        if self._change is None and self._machines.is_time_for_change() and self._is_changing():
            assert self._change is not None
            is_first = self._worker_group.group_rank == 0
            if self._change.in_process:
                self._signal_at = math.inf
                set_joining(self._scratch, is_first)
            else:
                begins = self._change.is_joining and is_first
                self._signal_at = time.monotonic() + (0 if begins else _AGREEING_SECONDS)
        if self._change is not None and time.monotonic() >= self._signal_at:
            self._signal_at = math.inf
            self._tell(signal.SIGTERM)

    def _serve_replacement(self) -> None:
        """Leave the run for a machine that waits, if a rank has found this one slow."""
        request = self._scratch / REPLACE
        if self._passed_on is None and request.exists():
            request.unlink()
            if self._machines.can_be_replaced():
                self._say(f"{socket.gethostname()} is slow and leaves the run for a machine that waits")
                self.signals.append(signal.SIGTERM)

    def _serve_newcomers(self) -> None:
        """Announce whether they can join in the process, as the main process says."""
        if self._worker_group.group_rank == 0:
            self._machines.open_for(open_for(self._scratch))

    def _is_changing(self) -> bool:
        """Return whether a machine joins or leaves, so that those that stay meet again."""
        if self._change is None and (change := self._machines.change()) is not None:
            self._change = change
            if self._passed_on is None:
                self._say(change.text)
        return self._change is not None and self._passed_on is None

    def _ends_for_change(self) -> bool:
        """Return whether the ranks end because a machine joins or leaves."""
        return self._change is not None and not self._change.in_process and self._passed_on is None

    def _leaving_code(self, endings: list[int | None]) -> int:
        return 130 if self._passed_on == signal.SIGINT or (self._passed_on is None and 130 in endings) else 143

    # Ends of ranks, and restarts

    @property
    def _ranks(self) -> RankProcesses:
        assert isinstance(self._pcontext, (SubprocessContext, MultiprocessContext))
        return RankProcesses(self._pcontext)

    @property
    def _sent(self) -> int | None:
        """The signal that was sent to end the ranks; None without one."""
        return signal.SIGTERM if self._ends_for_change() else self._passed_on

    def _first_failure(self) -> Failure | None:
        """End all ranks and return the first failure; None if a rank only obeyed the forwarded signal."""
        ranks = self._ranks
        ranks.settle()
        if self._serve_signals():
            return None
        codes, sent = ranks.exit_codes(), self._sent
        failures = ranks.failures(self.workers, codes, sent)
        ranks.close(signal.SIGTERM)
        if sent is not None and -sent in codes.values():
            return None  # other ranks may have failed because these had left
        first, *others = failures
        for other in others:
            self._say(other.follow_up)
        return first

    def _shutdown(self, *args: Any, **options: Any) -> None:
        super()._shutdown(*args, **options)
        if self._pcontext is not None:
            self._ranks.close_output()

    def _end_after(self, failure: Failure | None) -> RunResult:
        """End this start of the ranks after a failure, or after they obeyed a signal (None)."""
        if self._machines.rendezvous.is_outvoted():
            if failure is not None:
                self._say(failure.error.partition("CutOffError: ")[2] or failure.report().message)
            return self._end(goes_on=True)
        if self._is_changing() and self._ends_for_change():
            if failure is not None:  # since others have left before it
                self._say(failure.report().message)
            return self._end(goes_on=True)
        if failure is None:
            self.exit_code = self.exit_code or self._leaving_code([])
            return self._end(goes_on=False)
        self.failed = failure.report(self.remedies.get(failure.exit_code or 0, ""))
        if self._passed_on is not None and (news := self._machines.news(at_once=True)) is not None:
            return self._follow(news)
        lost = self._machines.lost()
        if self._leaves_alone or (self._passed_on is not None and (lost or follows_loss(self.failed))):
            self._say(str(self.failed))
            return self._end(goes_on=True)
        goes_on = self._passed_on is None and (bool(lost) or self._goes_on())
        first = self._machines.announce(self.failed, goes_on, is_loss=bool(lost))
        if first.failure.rank != self.failed.rank:
            return self._follow(first)
        if lost:
            self._say(f"{summary(self.failed)}; lost: {lost}; restart, which --max-restarts does not count")
        else:
            self._failures.record(self._machines.host)
        return self._end(goes_on)

    def _follow(self, news: News) -> RunResult:
        """Do what the machine does whose failure was announced first."""
        self.failed = news.failure
        if news.goes_on and self._passed_on is None:
            self._say(f"{summary(self.failed)}; restart with the other machines")
        if not news.is_loss:
            self._failures.record(news.host)
        return self._end(news.goes_on)

    def _end(self, goes_on: bool) -> RunResult:
        if goes_on and self._passed_on is not None:  # without this machine
            goes_on, self.exit_code = False, self._leaving_code([])
        if not goes_on:
            self._remaining_restarts = 0
        elif self._remaining_restarts < 1:  # torch's agent counts down from max_restarts
            self._worker_group.spec.max_restarts += 1 - self._remaining_restarts
            self._remaining_restarts = 1
        return RunResult(state=WorkerState.FAILED)

    def _goes_on(self) -> bool:
        """Decide whether to restart after a failure; one of a newcomer must not come back with it to the others."""
        if self._limit.failures == 0 or self._is_preparing:
            return False
        assert self.failed is not None
        goes_on, words = self._failures.decide(
            newest_step(self._progress_file), self._step_at_start, self._machines.host
        )
        self._say(f"{summary(self.failed)}; {words}" if goes_on else f"not restarted: {words}")
        return goes_on

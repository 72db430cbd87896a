"""`Agent`: torchrun's elastic agent with another view of failures, signals and restarts."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.failures import LEAVING, Failure, read_failure
from trainer_kit.launch.function import value_file
from trainer_kit.launch.output import OutputFiles
from trainer_kit.launch.rendezvous import Machines

# The first rank that fails ends the job within 10 seconds: this long the others may fail or end too, …
_SETTLE_SECONDS = 1.0
# … this long an error may stand in its file though the process does not end, …
_HANGING_SECONDS = 2.0
# … and this long they have to end after SIGTERM.
_END_SECONDS = 5


class Agent(LocalElasticAgent):
    """Starts the ranks of this machine, watches them, and starts them anew where that makes sense.

    It differs from torch's: a signal to the launcher is passed on once and then waited for; ranks that leave with exit
    code 143 or 130 have not failed; the first failure is found by time, whatever happened to the others in the same
    moment; a run that gets on is restarted more often than asked for; all machines do the same.

    Args:
        spec: What to start.
        output: Where ranks write.
        start_method: How processes are started that run a function.
        machines: The way to the agents of the other machines.
        signals: What this process is sent and the agent has not served; any thread may add to it.
        say: Shows a sentence to the user.

    Attributes:
        signals: As above.
        has_started: Whether there are, or were, ranks.
        exit_code: 143 or 130 after the ranks have left; None otherwise.
        remedies: What to do after a rank ended by a signal, by its exit code.
        failed: The failure that ended the run.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        output: OutputFiles,
        start_method: str,
        machines: Machines,
        signals: deque[int],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spec, output, start_method, log_line_prefix_template=output.prefix)
        self._asked = spec.max_restarts
        self._progress_file = output.scratch / "progress"
        self._machines = machines
        self._say = say
        self._passed_on: int | None = None
        self._step_at_start: int | None = None
        self.signals = signals
        self.has_started = False
        self.exit_code: int | None = None
        self.remedies: Mapping[int, str] = {}
        self.failed: ProcessFailed | None = None

    @property
    def workers(self) -> list[Worker]:
        """The ranks of this machine."""
        return list(self._worker_group.workers)

    def values(self) -> dict[int, Any]:
        """What the ranks' functions returned, by global rank."""
        files = {
            worker.global_rank: value_file(self._context.error_files[worker.local_rank]) for worker in self.workers
        }
        return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items()}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._store = worker_group.store = None  # the old one must be gone before a new one can take its port
        self._machines.leave()
        super()._rendezvous(worker_group)
        assert worker_group.store is not None
        self._machines.join(worker_group.store)
        # A machine that came later has counted fewer restarts, but the ranks of all must be told the same.
        allowed = worker_group.spec.max_restarts
        machines = worker_group.group_rank, worker_group.group_world_size
        self._remaining_restarts = allowed - self._machines.most(allowed - self._remaining_restarts, *machines)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.failed is None:  # torch saw another machine come before we read why
            news = self._machines.news(at_once=True)
            self.failed = news and news.failure
            self._remaining_restarts -= 1  # the ranks must know that they start anew
            reason = self._summary() if self.failed else "a machine has joined again"
            self._say(f"{reason}; restart with the other machines")
        self.failed = None
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.signals:
            raise InterruptedError("a signal came before the processes were started")
        self.has_started = True
        self._step_at_start = self._step()
        if hasattr(signal, "pthread_sigmask") and not isinstance(worker_group.spec.entrypoint, str):
            # A process that is being started inherits this, and holds Ctrl-C back until `Function` can serve it.
            if self._start_method != "fork":
                resource_tracker.ensure_running()  # would unblock it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._serve_signals():
            return self._end(goes_on=False)
        if any(map(self._is_failed, self._exit_codes())):
            return self._end_after(self._first_failure())
        news = self._machines.news()
        if news is not None:
            self._close(signal.SIGTERM)
            self.failed = news.failure
            goes_on = news.goes_on and self._asked > 0
            if goes_on:
                self._say(f"{self._summary()}; restart with the other machines")
            return self._end(goes_on)
        endings = [self._ending(local_rank) for local_rank in self._exit_codes()]
        if None in endings:
            return RunResult(state=WorkerState.HEALTHY)
        if any(endings):
            self.exit_code = self._leaving_code(endings)
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return self._end(goes_on=False)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    # Signals

    def _serve_signals(self) -> bool:
        """Passes the first signal on; a second one ends the ranks at once. Returns whether it did."""
        while self.signals:
            number = self.signals.popleft()
            if self._passed_on is not None:
                self._close(signal.SIGKILL)
                self.exit_code = self._leaving_code([])
                return True
            # A hangup means nothing to a rank, which has no terminal of its own.
            self._passed_on = signal.SIGTERM if number == getattr(signal, "SIGHUP", None) else number
            codes, pids = self._exit_codes(), self._context.pids()
            for local_rank in (rank for rank, code in codes.items() if code is None):
                # To the process alone: workers of a data loader would die of it, which the rank still needs.
                os.kill(pids[local_rank], self._passed_on)
        return False

    def _leaving_code(self, endings: list[int | None]) -> int:
        by_keyboard = self._passed_on == signal.SIGINT or (self._passed_on is None and 130 in endings)
        return 130 if by_keyboard else 143

    # Ends of ranks

    @property
    def _context(self) -> SubprocessContext | MultiprocessContext:
        assert isinstance(self._pcontext, (SubprocessContext, MultiprocessContext))
        return self._pcontext

    def _exit_codes(self) -> dict[int, int | None]:
        """Exit code by local rank, minus the signal's number where one ended it; None where it still runs."""
        context = self._context
        if isinstance(context, SubprocessContext):
            return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
        assert context._pc is not None
        return {rank: process.exitcode for rank, process in enumerate(context._pc.processes)}

    def _ending(self, local_rank: int) -> int | None:
        """0 for a rank that is done, 143 or 130 for one that has left, None for one that goes on."""
        code = self._exit_codes()[local_rank]
        if code is None and isinstance(self._context, MultiprocessContext):
            return 0 if value_file(self._context.error_files[local_rank]).exists() else None
        return 143 if code is not None and code < 0 else code

    def _is_failed(self, local_rank: int) -> bool:
        code, error_file = self._exit_codes()[local_rank], self._context.error_files[local_rank]
        if code is None:
            return os.path.exists(error_file) and time.time() - os.path.getmtime(error_file) > _HANGING_SECONDS
        if code == 0 and isinstance(self._context, MultiprocessContext):
            return not value_file(error_file).exists()
        return code not in (0, *LEAVING) and not self._was_told(code)

    def _was_told(self, code: int | None) -> bool:
        """Whether a rank with this exit code died of the signal that was passed on to it."""
        return self._passed_on is not None and code == -self._passed_on

    def _first_failure(self) -> Failure | None:
        """Ends all ranks, and says which one failed first; None where some only did as they were told."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while None in self._exit_codes().values() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._serve_signals():
            return None
        codes, context = self._exit_codes(), self._context
        failures = [
            read_failure(worker.global_rank, code, context.error_files[rank], context.stderrs[rank])
            for worker, (rank, code) in zip(self._worker_group.workers, sorted(codes.items()), strict=True)
            if self._is_failed(rank) or (code is None and os.path.exists(context.error_files[rank]))
        ]
        self._close(signal.SIGTERM)
        if any(map(self._was_told, codes.values())):
            return None  # others may have failed because these were gone
        first, *others = sorted(failures, key=lambda failure: failure.time)
        for failure in others:
            error = failure.error.partition("\n")[0]
            ending = f"failed after that: {error}" if error else f"{failure.ending} after that"
            self._say(f"rank {failure.rank} {ending}")
        return first

    def _close(self, number: signal.Signals) -> None:
        self._context.close(number, _END_SECONDS)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        super()._shutdown(*args, **options)
        if isinstance(self._pcontext, SubprocessContext):  # torch closes only the files of ranks that it had to end
            for handler in self._pcontext.subprocess_handlers.values():
                for file in (handler._stdout, handler._stderr):
                    if file is not None:
                        file.close()

    # Restarts

    def _end_after(self, failure: Failure | None) -> RunResult:
        """Ends this start of the ranks after a failure, or after they did as they were told (None)."""
        if failure is None:
            self.exit_code = self.exit_code or self._leaving_code([])
            return self._end(goes_on=False)
        self.failed = failure.report(self.remedies.get(failure.exit_code or 0, ""))
        goes_on = self._goes_on()
        self._machines.announce(self.failed, goes_on)
        return self._end(goes_on)

    def _end(self, goes_on: bool) -> RunResult:
        if not goes_on:
            self._remaining_restarts = 0
        elif self._remaining_restarts < 1:  # torch's agent counts down from what its spec allows
            self._worker_group.spec.max_restarts += 1 - self._remaining_restarts
            self._remaining_restarts = 1
        return RunResult(state=WorkerState.FAILED)

    def _goes_on(self) -> bool:
        """Whether the ranks are restarted: as often as asked for, then while the run gets on; says so, or why not."""
        if not self._asked:
            return False
        number, step = self._worker_group.spec.max_restarts - self._remaining_restarts + 1, self._step()
        count = f"restart {number} of {self._asked}"
        if number > self._asked:
            if step is None or (self._step_at_start is not None and step <= self._step_at_start):
                since = "written" if step is None else f"newer than that of step {step}"
                self._say(f"not restarted: {number - 1} restarts are made, and no checkpoint is {since} since the last")
                return False
            count = f"restart {number}, more than max_restarts={self._asked}, since there is a newer checkpoint"
        where = "" if step is None else f", from the checkpoint of step {step}"
        self._say(f"{self._summary()}; {count}{where}")
        return True

    def _summary(self) -> str:
        """The failure in one line."""
        assert self.failed is not None
        error = self.failed.traceback.strip().rpartition("\n")[2]
        return f"{self.failed.message} ({error})" if error else self.failed.message

    def _step(self) -> int | None:
        """The step of the newest checkpoint, which the ranks report."""
        try:
            return int(self._progress_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

"""`RankProcesses`: the processes of this machine's ranks, how they have ended, and signals to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext

from trainer_kit.launch.failures import LEAVING, Failure, read_failure
from trainer_kit.launch.function import value_file

# The first failed rank ends the job within 10 seconds: the others may fail or end too within this time, …
_SETTLE_SECONDS = 1.0
# … a process may stay alive this long after it has written its error, …
_HANGING_SECONDS = 3.0
# … and the others have this long to end after SIGTERM.
_END_SECONDS = 5


class RankProcesses:
    """The processes of this machine's ranks.

    Args:
        context: Torch's processes.
    """

    def __init__(self, context: SubprocessContext | MultiprocessContext) -> None:
        self._context = context
        self._is_function = isinstance(context, MultiprocessContext)

    def exit_codes(self) -> dict[int, int | None]:
        """Return exit codes by local rank, negative for a signal; None for a rank that still runs."""
        context = self._context
        if isinstance(context, SubprocessContext):
            return {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
        assert context._pc is not None
        return {rank: process.exitcode for rank, process in enumerate(context._pc.processes)}

    def value_file(self, local_rank: int) -> Path:
        """Return the file for the value of a rank's function."""
        return value_file(self._context.error_files[local_rank])

    def ending(self, local_rank: int, code: int | None) -> int | None:
        """Return 0 for a rank that is done, 143 or 130 for one that has left, None for one that still runs."""
        if code is None and self._is_function:
            return 0 if self.value_file(local_rank).exists() else None
        return 143 if code is not None and code < 0 else code

    def is_failed(self, local_rank: int, code: int | None, sent: int | None) -> bool:
        """Return whether a rank has failed.

        Args:
            local_rank: The rank.
            code: Its exit code.
            sent: The signal that was sent to end the ranks; None without one.
        """
        if code is None:
            return os.path.exists(self._context.error_files[local_rank]) and not self._is_ending(local_rank)
        if code == 0 and self._is_function:
            return not self.value_file(local_rank).exists()
        return code not in (0, *LEAVING) and (sent is None or code != -sent)

    def settle(self) -> None:
        """Wait a moment after a failure for ranks that fail or end too."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while any(
            code is None and (time.monotonic() < deadline or self._is_ending(rank))
            for rank, code in self.exit_codes().items()
        ):
            time.sleep(0.05)

    def failures(self, workers: Iterable[Worker], codes: Mapping[int, int | None], sent: int | None) -> list[Failure]:
        """Return the failures, the earliest first.

        Args:
            workers: Ranks of this machine.
            codes: Their exit codes.
            sent: See `is_failed`.
        """
        context = self._context
        found = [
            read_failure(worker.global_rank, code, context.error_files[rank], context.stderrs[rank])
            for worker, (rank, code) in zip(workers, sorted(codes.items()), strict=True)
            if self.is_failed(rank, code, sent) or (code is None and os.path.exists(context.error_files[rank]))
        ]
        return sorted(found, key=lambda failure: failure.time)

    def send(self, number: int) -> None:
        """Send a signal to the ranks that run."""
        codes, pids = self.exit_codes(), self._context.pids()
        for local_rank in (rank for rank, code in codes.items() if code is None):
            # Only to the process itself: the signal would kill its data loader workers, which the rank still needs.
            os.kill(pids[local_rank], number)

    def wait(self, seconds: float) -> None:
        """Wait for the ranks to end by themselves, up to some seconds."""
        deadline = time.monotonic() + seconds
        while None in self.exit_codes().values() and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self, number: signal.Signals) -> None:
        """End the ranks, by SIGKILL if the signal does not end them in time."""
        self._context.close(number, _END_SECONDS)

    def close_output(self) -> None:
        """Close the files that the ranks wrote to; torch closes those of ranks that it ended."""
        if isinstance(self._context, SubprocessContext):
            for handler in self._context.subprocess_handlers.values():
                for file in (handler._stdout, handler._stderr):
                    if file is not None:
                        file.close()

    def _is_ending(self, local_rank: int) -> bool:
        """Return whether a rank has just written its error, so that it is about to exit."""
        error_file = self._context.error_files[local_rank]
        return os.path.exists(error_file) and time.time() - os.path.getmtime(error_file) <= _HANGING_SECONDS


def newest_step(progress: Path) -> int | None:
    """Return the step of the newest checkpoint, which the ranks report; None if there is none.

    Args:
        progress: File that they report it in.
    """
    try:
        return int(progress.read_text())
    except (FileNotFoundError, ValueError):
        return None

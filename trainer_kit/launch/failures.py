"""Error files that failed ranks leave for the launcher, and their messages.

The file has the format of `torch.distributed.elastic.multiprocessing.errors`, which torch's own launcher reads too.
torch's handler is not used: it keeps the launcher's frames and whole seconds only, and requires an import of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from trainer_kit.errors import ProcessFailed

# A restart request and Ctrl-C: a rank that exits with these codes has not failed.
LEAVING = (143, 130)

_RUNPY = (runpy.__file__, "<frozen runpy>")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TAIL_LINES = 15

# The rank itself or the system causes these signals, never the death of another rank.
_FATAL = tuple(-getattr(signal, name, 0) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"))


class Failure(NamedTuple):
    """Failure of a rank.

    Attributes:
        rank: Global rank.
        exit_code: Exit code, negative for a signal; None if the rank still runs.
        time: Time of the failure, in seconds since the epoch.
        error: Type and message of the exception; empty if there is none.
        traceback: The whole traceback; empty if there is none.
        tail: Last lines of the rank's error output; empty if it has no file.
    """

    rank: int
    exit_code: int | None
    time: float
    error: str = ""
    traceback: str = ""
    tail: str = ""

    @property
    def ending(self) -> str:
        """How the rank ended: "failed with exit code 1", "was killed by SIGKILL (…)"."""
        if self.exit_code is None:
            return "failed and had to be ended"
        if self.exit_code < 0:
            try:
                name = signal.Signals(-self.exit_code).name
            except ValueError:
                name = f"signal {-self.exit_code}"
            why = " (probably the memory of its host ran out)" if name == "SIGKILL" else ""
            return f"was killed by {name}{why}"
        return f"failed with exit code {self.exit_code}" if self.traceback else f"left with exit code {self.exit_code}"

    @property
    def follow_up(self) -> str:
        """Sentence about a rank that ended after another one had failed."""
        error = self.error.partition("\n")[0]
        return f"rank {self.rank} " + (f"failed after that: {error}" if error else f"{self.ending} after that")

    def report(self, remedy: str = "") -> ProcessFailed:
        """Return the exception that reports the failure to the user.

        Args:
            remedy: Advice for a host that ran out of memory; empty for none.
        """
        message = f"rank {self.rank} on {socket.gethostname()} {self.ending}"
        if remedy:
            message = f"{message}; if the memory of its host ran out, {remedy}"
        return ProcessFailed(message, self.rank, self.exit_code, self.traceback, self.tail)


def write_failure(error: BaseException, own_files: Collection[str]) -> TracebackType | None:
    """Write this process's error to the file that the launcher named, unless there is none or the disk is full.

    Args:
        error: An exception, or a SystemExit with a nonzero exit code.
        own_files: Files of the calling code, whose frames are removed.

    Returns:
        The traceback from the user's first frame on.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (*own_files, *_RUNPY):
        trace = trace.tb_next
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        is_exit = isinstance(error, SystemExit)
        lines = [] if is_exit else _formatted(error, trace)
        now = time.time()
        extra = {"py_callstack": "".join(lines), "timestamp": str(int(now)), "time": now}
        last_line = "".join(traceback.format_exception_only(type(error), error)).strip()
        message = {"message": last_line, "extraInfo": extra}
        # Written under another name first, because the launcher may read at any moment.
        unfinished = Path(f"{path}.unfinished")
        with contextlib.suppress(OSError):  # a full disk must not hide the error itself
            unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
            unfinished.replace(path)
    return trace


def is_reported() -> bool:
    """Return whether this process's error is in the launcher's file; otherwise the process must show it."""
    return os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))


def _formatted(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Format the traceback; an error that this package raises on purpose ends at the user's own line."""
    shown = traceback.TracebackException(type(error), error, trace)
    frames = shown.stack
    if frames and frames[-1].filename.startswith(_PACKAGE) and (frames[-1].line or "").startswith("raise "):
        own = (_PACKAGE, "<string>")  # "<string>": methods that dataclasses generate
        users = [number for number, frame in enumerate(frames) if not frame.filename.startswith(own)]
        del frames[users[-1] + 1 if users else 1 :]
    return list(shown.format())


def read_failure(rank: int, exit_code: int | None, error_file: str, stderr_file: str) -> Failure:
    """Read the failure of a rank.

    A failure without a recorded time counts as the newest, or as the first if only the rank itself can have caused it.

    Args:
        rank: Global rank.
        exit_code: Exit code, negative for a signal; None if the rank still runs.
        error_file: Path of the rank's error file; may be missing.
        stderr_file: Path of the rank's error output; empty if there is none.
    """
    path = Path(error_file)
    if path.is_file():
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        when = float(extra.get("time", extra["timestamp"]))
        trace = extra["py_callstack"]
        return Failure(rank, exit_code, when, message["message"], trace, "" if trace else _tail(stderr_file))
    is_own_fault = exit_code in _FATAL or (exit_code is not None and exit_code >= 0)
    return Failure(rank, exit_code, 0.0 if is_own_fault else time.time(), tail=_tail(stderr_file))


def follows_loss(failure: ProcessFailed) -> bool:
    """Return whether a failure only follows from the loss of another process or machine, or from its leaving."""
    return failure.rank < 0 or "LostProcessError" in summary(failure)


def summary(failure: ProcessFailed) -> str:
    """Return a failure in one line."""
    error = failure.traceback.strip().rpartition("\n")[2]
    return f"{failure.message} ({error})" if error else failure.message


def _tail(path: str) -> str:
    if not path or not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 16384))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

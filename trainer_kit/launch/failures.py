"""What a rank that fails leaves behind for the launcher, and the words that are made of it.

The file has the format of `torch.distributed.elastic.multiprocessing.errors`, which torch's own launcher reads too. It
is written here, because torch's handler keeps the launcher's frames and whole seconds, and needs torch to be imported.
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

# "Start me again", and Ctrl-C: a rank that leaves with these has not failed.
LEAVING = (143, 130)

_RUNPY = (runpy.__file__, "<frozen runpy>")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TAIL_LINES = 15

# A rank dies of these by its own fault or by the system's, never because another rank died before.
_FATAL = tuple(-getattr(signal, name, 0) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"))


class Failure(NamedTuple):
    """A rank that failed.

    Attributes:
        rank: Which one, among all.
        exit_code: Its exit code, minus the signal's number where a signal ended it; None if it still runs.
        time: When it failed, in seconds of the clock.
        error: Type and message of its exception; empty where it left none.
        traceback: The whole of it; empty where it left none.
        tail: The last lines that it wrote to its file of errors; empty where it has none.
    """

    rank: int
    exit_code: int | None
    time: float
    error: str = ""
    traceback: str = ""
    tail: str = ""

    @property
    def ending(self) -> str:
        """How it ended: "failed with exit code 1", "was killed by SIGKILL (…)"."""
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

    def report(self, remedy: str = "") -> ProcessFailed:
        """The exception that tells a user of it, and what to do if the memory of the host ran out."""
        message = f"rank {self.rank} on {socket.gethostname()} {self.ending}"
        if remedy:
            message = f"{message}; if the memory of its host ran out, {remedy}"
        return ProcessFailed(message, self.rank, self.exit_code, self.traceback, self.tail)


def write_failure(error: BaseException, own_files: Collection[str]) -> TracebackType | None:
    """Writes this process's error to the file that the launcher named, if one did and the disk has room for it.

    Args:
        error: An exception, or a SystemExit with an exit code that is not 0.
        own_files: Files of the code that called the user's, whose frames are left out.

    Returns:
        The traceback from the user's own first frame on.
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
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        message = {"message": summary, "extraInfo": extra}
        # Renamed, because the launcher may look at any moment.
        unfinished = Path(f"{path}.unfinished")
        with contextlib.suppress(OSError):  # a full disk must not hide the error itself
            unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
            unfinished.replace(path)
    return trace


def is_reported() -> bool:
    """Whether this process's error has reached its launcher; otherwise the process has to show it."""
    return os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))


def _formatted(error: BaseException, trace: TracebackType | None) -> list[str]:
    """The traceback; what this package refuses with a sentence ends at the user's own line."""
    shown = traceback.TracebackException(type(error), error, trace)
    frames = shown.stack
    if frames and frames[-1].filename.startswith(_PACKAGE) and (frames[-1].line or "").startswith("raise "):
        own = (_PACKAGE, "<string>")  # the second is what dataclasses make
        users = [number for number, frame in enumerate(frames) if not frame.filename.startswith(own)]
        del frames[users[-1] + 1 if users else 1 :]
    return list(shown.format())


def read_failure(rank: int, exit_code: int | None, error_file: str, stderr_file: str) -> Failure:
    """What is known of a rank that failed.

    One that left no time counts as having failed just now, or first of all where nothing but its own fault can have
    ended it.
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


def _tail(path: str) -> str:
    if not path or not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 16384))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

"""Standard output and error as streams whose failures never end a training."""

from __future__ import annotations

import atexit
import io
import logging
import select
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("trainer_kit")

_NAMES = {"stdout": "standard output", "stderr": "standard error"}

_failures: dict[str, str] = {}
"""Why a stream could not be written to, by its name for people."""

_reported: set[str] = set()


def guard_standard_streams() -> None:
    """Drop what stdout and stderr cannot take, for the rest of this process, instead of raising.

    A closed pipe (`| head`), a full disk or a character outside of the stream's encoding then concerns neither `print`
    nor a progress bar nor the interpreter's last flush, after which it would exit with code 120. A stream that can be
    written to again shows what comes from then on. Streams that are no files (of a notebook, or the program's own
    objects) stay as they are. What was lost without a warning until the process ends is warned of then.
    """
    for name, label in _NAMES.items():
        for stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            raw = _raw_file(stream)
            if raw is not None and "write" not in vars(raw):
                # On the file itself: logging handlers, bars and consoles keep the stream that they found.
                vars(raw)["write"] = _guarded(raw, label)
    escape_unknown_characters()
    atexit.unregister(_warn_at_exit)
    atexit.register(_warn_at_exit)


def escape_unknown_characters() -> None:
    """Let stdout write characters that its encoding lacks as escapes, as stderr always does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def unreported_failures() -> list[str]:
    """Sentences about the streams that failed since the last call, each stream once in this process."""
    news = {label: reason for label, reason in _failures.items() if label not in _reported}
    _reported.update(news)
    return [
        f"{label} could not be written to: {reason}; what does not reach it is lost" for label, reason in news.items()
    ]


def warn_of_failed_streams() -> None:
    """Log a warning for each stream that failed since the last call."""
    for sentence in unreported_failures():
        logger.warning("%s; training continues", sentence)


def _warn_at_exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        if _raw_file(stream) is not None and not stream.closed:
            stream.flush()
    for sentence in unreported_failures():
        logger.warning("%s", sentence)


def _raw_file(stream: Any) -> io.FileIO | None:
    """The file beneath the buffers of a text stream; None where it has none."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # `python -u` has no buffer in between
    return raw if isinstance(raw, io.FileIO) else None


def _guarded(raw: io.FileIO, label: str) -> Callable[[Any], int]:
    """The file's `write`, for which a failure is no error."""
    # Bound here: what is printed while the interpreter ends comes when the names of this module are gone.
    write, wait, failures = io.FileIO.write, select.select, _failures

    def guarded(data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            while (written := write(raw, data)) is None:  # not blocking, and its reader is slow
                wait([], [raw.fileno()], [])
        except OSError as error:
            # Reported later: a handler that wrote to this stream now would find it in the middle of a write.
            failures.setdefault(label, error.strerror or str(error))
            return size
        return written

    return guarded

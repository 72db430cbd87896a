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
"""First error of each stream, by its name for people."""

_reported: set[str] = set()


def guard_standard_streams() -> None:
    """Drop output that stdout and stderr cannot write, instead of raising, for the rest of this process.

    A closed pipe (`| head`), a full disk or an unencodable character then breaks neither `print` nor a progress bar
    nor the interpreter's last flush, after which it would exit with code 120. Output resumes if the stream can be
    written again. Streams that are not files (a notebook's, or the program's own objects) are not changed. Failures
    that were not reported before are logged as warnings when the process ends.
    """
    for name, label in _NAMES.items():
        for stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            raw = _raw_file(stream)
            if raw is not None and "write" not in vars(raw):
                # Patched on the file itself: handlers, progress bars and consoles hold references to the stream.
                vars(raw)["write"] = _guarded(raw, label)
    escape_unknown_characters()
    atexit.unregister(_warn_at_exit)
    atexit.register(_warn_at_exit)


def escape_unknown_characters() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def unreported_failures() -> list[str]:
    """Return a sentence for each stream that has failed since the last call; each stream once in this process."""
    news = {label: reason for label, reason in _failures.items() if label not in _reported}
    _reported.update(news)
    return [
        f"{label} could not be written to: {reason}; what does not reach it is lost" for label, reason in news.items()
    ]


def warn_of_failed_streams() -> None:
    """Log a warning for each stream that has failed since the last call."""
    for sentence in unreported_failures():
        logger.warning("%s; training continues", sentence)


def _warn_at_exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        if _raw_file(stream) is not None and not stream.closed:
            stream.flush()
    for sentence in unreported_failures():
        logger.warning("%s", sentence)


def _raw_file(stream: Any) -> io.FileIO | None:
    """Return the raw file of a text stream; None if it has none."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # `python -u` has no buffer in between
    return raw if isinstance(raw, io.FileIO) else None


def _guarded(raw: io.FileIO, label: str) -> Callable[[Any], int]:
    """Return a replacement of the file's `write` that records errors instead of raising them."""
    # Bound here: at interpreter shutdown the names of this module are gone, and at last the built-in ones.
    write, wait, failures = io.FileIO.write, select.select, _failures
    view, failed, text = memoryview, OSError, str

    def guarded(data: Any) -> int:
        size = view(data).nbytes
        try:
            while (written := write(raw, data)) is None:  # a non-blocking pipe is full
                wait([], [raw.fileno()], [])
        except failed as error:
            # Reported later: a logging handler could write to this stream during this write.
            failures.setdefault(label, error.strerror or text(error))
            return size
        return written

    return guarded

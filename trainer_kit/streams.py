"""Standard output and error as streams whose failures never end a training."""

from __future__ import annotations

import functools
import io
import logging
import os
import select
import sys
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
    objects) stay as they are.
    """
    for name, label in _NAMES.items():
        for stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            raw = _raw_file(stream)
            if raw is not None and "write" not in vars(raw):
                # On the file itself: logging handlers, bars and consoles keep the stream that they found.
                vars(raw)["write"] = functools.partial(_write, raw, label)
    escape_unknown_characters()


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


def _raw_file(stream: Any) -> io.FileIO | None:
    """The file beneath the buffers of a text stream; None where it has none."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # `python -u` has no buffer in between
    return raw if isinstance(raw, io.FileIO) else None


def _write(raw: io.FileIO, label: str, data: Any) -> int:
    size = memoryview(data).nbytes
    try:
        while (written := io.FileIO.write(raw, data)) is None:  # not blocking, and its reader is slow
            select.select([], [raw.fileno()], [])
    except OSError as error:
        # Reported later: a handler that wrote to this stream now would find it in the middle of a write.
        _failures.setdefault(label, error.strerror or os.strerror(error.errno or 0))
        return size
    return written

"""What a process leaves behind when its watching thread ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time

from trainer_kit.errors import LostProcessError

_FLUSH_SECONDS = 2.0


def leave_with(sentence: str) -> None:
    """End this process with code 1 and a sentence, on the error stream and for the launcher."""
    flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may hold its locks
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
    _tell_launcher(sentence)
    with contextlib.suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    logging.shutdown()


def _tell_launcher(sentence: str) -> None:
    """Write the error file of torchrun's agent, which prints its content."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = f"{LostProcessError.__name__}: {sentence}"
        now = time.time()
        extra = {"py_callstack": text, "timestamp": str(int(now)), "time": now}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)

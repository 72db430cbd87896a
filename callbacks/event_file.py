"""`EventFile`: an event file of TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import socket
import time
from typing import Any

_FLUSH_SECONDS = 10.0
_numbers = itertools.count()


class EventFile:
    """Write events immediately in the caller's thread: errors reach the caller, and a kill loses nothing.

    torch's `SummaryWriter` writes in another thread, up to two minutes later, and its first error ends that thread.

    Args:
        folder: A folder or bucket that TensorBoard can read; made if it is missing.
        purge_step: Hides earlier events from this step on; None hides none.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):04}"
        self._path = os.path.join(folder, name)
        self._file = RecordWriter(_opened(folder, name))
        self._has_summary = False
        self._flushed = 0.0
        try:
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        except OSError:
            self.close()
            raise

    def add(self, summary: Any, step: int | None = None) -> None:
        """Write a `Summary`; a `step` of None is for the whole run."""
        self._write(step=step, summary=summary)

    def flush(self) -> None:
        """Flush all events to the file; a bucket does not get each event by itself."""
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file, and remove it if it has no summary."""
        self._file.close()
        if not self._has_summary:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _write(self, **parts: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **parts).SerializeToString())
        self._has_summary = self._has_summary or "summary" in parts
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()


class _WholeRecords(io.FileIO):
    """A new file to which a record is written completely or not at all."""

    def write(self, data: Any) -> int:
        before = self.tell()
        written = super().write(data)
        if written != len(data):
            self.seek(before)
            self.truncate()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written


def _opened(folder: str, name: str) -> Any:
    if "://" not in folder:  # TensorBoard's own files take only names in UTF-8
        os.makedirs(folder, exist_ok=True)
        return _WholeRecords(os.path.join(folder, name), "x")
    from tensorboard.compat import tf

    tf.io.gfile.makedirs(folder)
    return tf.io.gfile.GFile(f"{folder}/{name}", "wb")

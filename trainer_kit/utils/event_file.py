"""`EventFile`: an event file of TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import socket
import struct
import time
from typing import Any

from trainer_kit.utils.crc32c import crc32c

_FLUSH_SECONDS = 10.0
_HEADERS = ("file_version", "session_log")
_numbers = itertools.count()


class EventFile:
    """Write events immediately in the caller's thread: errors reach the caller, and a kill loses nothing.

    torch's `SummaryWriter` writes in another thread, up to two minutes later, and its first error ends that thread.

    Args:
        folder: A folder or bucket that TensorBoard can read; made if it is missing.
        purge_step: Hides earlier events from this step on; None hides none.
        suffix: End of the file's name.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, folder: str, purge_step: int | None = None, suffix: str = "") -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):04}"
        name += suffix
        self._folder, self._path = folder, os.path.join(folder, name)
        self._file = _opened(folder, name)
        self._has_content = False
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

    def add_event(self, event: Any) -> None:
        """Write an `Event`, as torch's `FileWriter` does."""
        self._file.write(_record(event.SerializeToString()))
        self._has_content = self._has_content or event.WhichOneof("what") not in _HEADERS
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def get_logdir(self) -> str:
        """Return the folder."""
        return self._folder

    def reopen(self) -> None:
        """Do nothing: torch's writer opens its thread's queue here."""

    def flush(self) -> None:
        """Flush all events to the file; a bucket does not get each event by itself.

        Raises:
            OSError: If the file cannot be written, or was removed.
        """
        if "://" not in self._path:
            os.stat(self._path)  # writes to a removed file succeed
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file, and remove it if it has only a header."""
        self._file.close()
        if not self._has_content:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _write(self, **parts: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.add_event(Event(wall_time=time.time(), **parts))


def summary_writer(folder: str, **options: Any) -> Any:
    """Return a `SummaryWriter` of torch that writes through `EventFile`.

    Args:
        folder: See `EventFile`.
        options: Arguments of `SummaryWriter`; `max_queue` and `flush_secs` have no effect.
    """
    from torch.utils.tensorboard import FileWriter, SummaryWriter

    class DirectFile(FileWriter):
        def __init__(self, folder: str, purge_step: int | None, suffix: str) -> None:
            self.event_writer = EventFile(folder, purge_step, suffix)

    class DirectWriter(SummaryWriter):
        file_writer: Any  # None before the first event and after `close`
        all_writers: Any  # by folder

        def _get_file_writer(self) -> Any:
            if self.file_writer is None:
                self.file_writer = DirectFile(self.log_dir, self.purge_step, self.filename_suffix)
                self.all_writers, self.purge_step = {self.log_dir: self.file_writer}, None
            return self.file_writer

        def add_scalars(self, main_tag: str, tag_scalar_dict: Any, *more: Any, **options: Any) -> None:
            self._get_file_writer()
            for tag in tag_scalar_dict:  # each has a folder of its own, for which torch would start a thread
                place = f"{self.log_dir}/{main_tag.replace('/', '_')}_{tag}"
                if place not in self.all_writers:
                    self.all_writers[place] = DirectFile(place, None, self.filename_suffix)
            super().add_scalars(main_tag, tag_scalar_dict, *more, **options)

    return DirectWriter(folder, **options)


def _record(content: bytes) -> bytes:
    """Return a record of a file of TensorBoard (a TFRecord): its length and its content, each with a checksum."""
    length = struct.pack("<Q", len(content))
    return length + _masked_checksum(length) + content + _masked_checksum(content)


def _masked_checksum(content: bytes) -> bytes:
    checksum = crc32c(content)
    # As TFRecord prescribes: the checksum of bytes that hold checksums themselves would be weak.
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


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

"""Supervision of a DataLoader's workers, whose errors name the worker, and the samples that they send."""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from trainer_kit.data.worker_deaths import WorkerDeaths
from trainer_kit.errors import WorkerError
from trainer_kit.utils.process_identity import process_state

_END = object()
_LAST_SECONDS = 20
"""Seconds that a worker keeps running after SIGTERM."""


def worker_items(loader: DataLoader[Any], timeout_name: str = "timeout") -> Iterator[Any]:
    """Yield the items of a DataLoader's workers.

    Args:
        loader: A DataLoader with workers. Its timeout, in seconds, limits the time for an item; 0: no limit.
        timeout_name: Name of the timeout for the user, in errors.

    Raises:
        WorkerError: If a worker was killed while it sent a batch (torch reports other cases), or sent nothing within
            the timeout.
    """
    iterator = iter(loader)
    deaths = WorkerDeaths.of(iterator)
    watch = _Watch(iterator, loader.timeout) if loader.timeout else None
    try:
        while True:
            if watch is not None:
                watch.since = time.monotonic()
            item = deaths.read(iterator, _END)
            if watch is not None:
                watch.since = None
            if item is _END:
                return
            yield item
    except Exception as error:
        # The DataLoader's frames form a reference cycle with the error. Without this, the garbage collector ends the
        # workers late and with error messages.
        traceback.clear_frames(error.__traceback__)
        said = "" if watch is None else watch.close() or _found(iterator, str(error))
        if said:
            raise WorkerError(f"no batch came within {timeout_name}={loader.timeout:g} seconds: {said}") from error
        if isinstance(error, (EOFError, ConnectionError)) and "in DataLoader worker" not in str(error):
            raise WorkerError(
                "a DataLoader worker ended while it handed over a batch; where the system killed it for its memory, "
                "set a smaller dataloader_num_workers or batch size"
            ) from error
        raise
    finally:
        if watch is not None:
            watch.close()
        del iterator, watch  # an error that is held would hold this frame, and thereby keep the workers alive


class _Watch(threading.Thread):
    """A thread that kills stopped workers (SIGSTOP) when the wait for a batch exceeds the timeout.

    torch's own timeout misses them if it waits for the shared memory of a batch that such a worker made.

    Attributes:
        since: Monotonic time at which the wait for a batch began; None if there is no wait.
        found: Description of the killed worker; empty if none was killed.
    """

    def __init__(self, iterator: Any, timeout: float) -> None:
        super().__init__(name="trainer_kit-workers", daemon=True)
        self.since: float | None = None
        self.found = ""
        self._iterator = iterator
        self._timeout = timeout
        self._closed = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout / 4)):
            since = self.since
            if since is None or time.monotonic() - since < self._timeout:
                continue
            self.found = _kill_stopped(self._iterator) or self.found

    def close(self) -> str:
        """End the thread; return `found`, which is set only after the worker is killed."""
        self._closed.set()
        self.join()
        return self.found


def _forget_pids(iterator: Any) -> None:
    """Keep torch's SIGCHLD handler from raising later because a worker was killed."""
    if iterator._worker_pids_set:
        iterator._worker_pids_set = False
        torch._C._remove_worker_pids(id(iterator))


def _kill_stopped(iterator: Any) -> str:
    """Kill the stopped workers, which no other signal reaches; return words for the last one, empty without any."""
    found = ""
    for number, worker in enumerate(iterator._workers):
        if worker.is_alive() and process_state(worker.pid) == "stopped":
            found = f"DataLoader worker {number} (process {worker.pid}) is stopped (by SIGSTOP)"
            _forget_pids(iterator)
            worker.kill()
    return found


def _found(iterator: Any, message: str) -> str:
    """Describe and kill the worker that torch waited for when its timeout expired; empty for another error."""
    if not message.startswith("DataLoader timed out"):
        return ""
    if found := _kill_stopped(iterator):
        return found
    _forget_pids(iterator)
    late, *_ = iterator._task_info[iterator._rcvd_idx]
    worker = iterator._workers[late]
    worker.kill()  # torch would wait for it, and its SIGTERM ends it late
    return (
        f"DataLoader worker {late} (process {worker.pid}) hangs or is slow in the dataset or collator; set a larger "
        "timeout if it is slow"
    )


def watch_division() -> Callable[[], bool]:
    """Return a function that says whether code in this worker has since asked which one of how many it is.

    A dataset has to, to give its share only. The answer is True where there is one worker, or none.
    """
    info = get_worker_info()
    if info is None or info.num_workers == 1:
        return lambda: True
    asked: list[bool] = []

    class Watched(type(info)):  # type: ignore[misc]
        __slots__ = ()  # else the object could not become one

        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                asked.append(True)
            return super().__getattribute__(name)

    object.__setattr__(info, "__class__", Watched)
    return lambda: bool(asked)


def worker_init(own: Callable[[int], Any] | None = None, context: Any = None) -> Any:
    """Return the `worker_init_fn` of a DataLoader.

    Args:
        own: The user's, called with the worker's number.
        context: The DataLoader's `multiprocessing_context`.
    """
    if context is None or isinstance(context, str):
        context = multiprocessing.get_context(context)
    return functools.partial(_begin_worker, os.getpid() if context.get_start_method() == "fork" else None, own)


def _begin_worker(main: int | None, own: Callable[[int], Any] | None, number: int) -> None:
    """Exit if the main process was killed meanwhile: torch would take the adopting process for it, forever."""
    if main is not None:
        if os.getppid() != main:
            os._exit(1)
        _keep_main(main)
    _outlive_signals()
    if own is not None:
        own(number)


def _keep_main(main: int) -> None:
    """Let torch's watchdog, which this worker creates later, watch the main process even if that is killed before."""

    class Watchdog(torch_worker.ManagerWatchdog):
        def __init__(self) -> None:
            super().__init__()
            self.manager_pid = main

    torch_worker.ManagerWatchdog = Watchdog  # type: ignore[misc]  # in this process alone


def _outlive_signals() -> None:
    """Ignore Ctrl-C and a scheduler's signals, since the main process needs data to finish the step.

    SIGTERM also ends a hanging worker, so the worker exits some seconds after it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _end_soon)


def _end_soon(number: int, frame: FrameType | None) -> None:
    signal.alarm(_LAST_SECONDS)


class _Pickler(pickle.Pickler):
    """Pickle the elements of a tensor alone, not the whole memory that it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.untyped_storage().nbytes() > value.nbytes:
            return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def packed(samples: list[Any]) -> bytes:
    """Return samples as bytes for another process: sent as they are, each tensor would take a file descriptor."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(samples)
    return file.getvalue()


def unpacked(samples: bytes) -> list[Any]:
    """Return the samples that `packed` was given."""
    found: list[Any] = pickle.loads(samples)
    return found

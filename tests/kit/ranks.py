"""Functions run on several processes of this machine, which stay alive between tests.

    from kit.ranks import on_ranks

    def gradients(rows: int) -> list[float]:      # of a module that children can import: a test module or its helper
        strategy = DDP()
        strategy.setup()
        ...

    def test_gradients():
        assert on_ranks(2, gradients, 5) == [...]  # what each rank returned, in order of rank

Each call sets the variables that torchrun sets, with a port of its own, and ends with the process group destroyed. An
exception of a rank is raised here, the first one's, rather than the end of a process that waited for it. A call that
does not end within `timeout` seconds ends the processes and fails; before that they print the stacks of their threads.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

from kit.forked import fork_server

_FIRST_PORT, _PORTS = 12_000, 20_000
"""Those below the ports that systems give to connections."""

_pool: list[_Rank] = []
"""The processes, by rank; a call on more of them starts those that are missing."""


_MAX_THREADS = 60
"""Threads with which a process is replaced: groups that something keeps have three each, which never rest."""

_ASKS_FOR_NEWER = re.compile(r"use torch [\d.]+ or newer")


class RankFailed(AssertionError):
    """A rank raised or ended; `error` is what it raised (None if it ended, or if that cannot be pickled)."""

    def __init__(self, rank: int, error: BaseException | None, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank = rank
        self.error = error


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` on `world_size` processes; returns what each returned, in order of rank."""
    results = try_on_ranks(world_size, function, *args, timeout=timeout, **kwargs)
    failed = [result for result in results if isinstance(result, RankFailed)]
    if failed:
        raise next((failure for failure in failed if failure.error is not None), failed[0])
    return results


def try_on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> Any:
    """The same, with a `RankFailed` in place of what a rank that raised did not return."""
    try:
        _start(world_size - len(_pool))
        port = free_port()
        for rank, process in enumerate(_pool[:world_size]):
            process.begin(rank, world_size, port, timeout, function, args, kwargs)
        results: list[Any] = []
        for rank, process in enumerate(_pool[:world_size]):
            has_ended = any(not each.process.is_alive() for each in _pool)
            try:
                results.append(process.end(rank, world_size, min(timeout, 10) if has_ended else timeout))
            except TimeoutError as error:
                first = next((result for result in results if isinstance(result, RankFailed)), None)
                raise AssertionError(f"{error}; {first or 'no other failed'}") from error
        if any(not each.process.is_alive() or each.threads() > _MAX_THREADS for each in _pool):
            _end()
        for result in results:
            if isinstance(result, RankFailed) and _ASKS_FOR_NEWER.search(str(result.error)):
                pytest.skip(str(result.error))
        return results
    except BaseException:
        _end()
        raise


def free_port() -> int:
    """A port that nobody listens at, and that no other process of tests gets for a long time.

    All of them share a counter, since a port that is chosen at random may be taken before it is used.
    """
    with open(os.path.join(tempfile.gettempdir(), f"trainer_kit_test_port_{os.getuid()}"), "a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        last = int(counter.read() or os.getpid())
        for number in range(last + 1, last + _PORTS):
            port = _FIRST_PORT + number % _PORTS
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                counter.truncate(0)
                counter.write(str(number % _PORTS))
                return port
    raise AssertionError("all ports of tests are in use")


class _Rank:
    """A process that waits for work."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def begin(
        self, rank: int, world_size: int, port: int, timeout: float, function: Callable[..., Any], *given: Any
    ) -> None:
        place = {
            "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size,
            "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = {name: str(value) for name, value in place.items()}
        home = str(sys.modules[function.__module__].__file__ or "")
        # Pickled here: a Connection's own way would share tensors by file descriptors.
        work = (timeout, environment, function.__module__, home, function.__qualname__, *given)
        self.connection.send_bytes(pickle.dumps(work))

    def threads(self) -> int:
        try:
            return int(psutil.Process(self.process.pid).num_threads())
        except psutil.NoSuchProcess:
            return 0

    def end(self, rank: int, world_size: int, timeout: float) -> Any:
        if not self.connection.poll(timeout):
            raise TimeoutError(f"rank {rank} of {world_size} does not end within {timeout} s")
        try:
            result = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join(timeout)
            return RankFailed(rank, None, f"it ended with exit code {self.process.exitcode}")
        return RankFailed(rank, *result[1:]) if result[0] == "raised" else result[1]


def _start(count: int) -> None:
    """Start more processes."""
    if count <= 0:
        return
    with Listener(("127.0.0.1", 0), authkey=b"ranks") as listener:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        given = int(listener.address[1]), os.getpid(), environment
        processes = [fork_server().Process(target=_serve, args=given) for _ in range(count)]
        for process in processes:
            process.start()
        by_number = {process.pid: process for process in processes}
        listener._listener._socket.settimeout(60)  # type: ignore[attr-defined]  # accept() has no limit of its own
        try:
            for _ in range(count):
                connection = listener.accept()
                _pool.append(_Rank(by_number.pop(connection.recv()), connection))
        finally:
            for process in by_number.values():  # those that did not come
                process.kill()
                process.join()


@atexit.register
def _end() -> None:
    for rank in _pool:
        rank.process.kill()
    for rank in _pool:
        rank.process.join()
    _pool.clear()


def _function(module: str, home: str, name: str) -> Callable[..., Any]:
    """Test modules are imported by their file, since pytest gives them names of its own."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ImportError:
            spec = importlib.util.spec_from_file_location(module, home)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _serve(port: int, parent: int, environment: dict[str, str]) -> None:
    import torch.distributed as dist

    from trainer_kit.strategies import ddp
    from trainer_kit.utils.thread_pool import renew_thread_pool

    multiprocessing.set_start_method(None, force=True)  # data workers are forked, as from a process of a command
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("error")  # as setup.cfg has it
    for kind in (DeprecationWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", "invalid escape sequence", kind)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    warnings.filterwarnings("ignore", r"Guards may run slower on Python 3\.13\.0", RuntimeWarning)
    renew_thread_pool()
    dist.set_debug_level(dist.DebugLevel.OFF)
    connection = Client(("127.0.0.1", port), authkey=b"ranks")
    connection.send(os.getpid())
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    while True:
        try:
            timeout, environment, module, home, name, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(max(timeout - 1, timeout / 2))
        os.environ.update(environment)
        try:
            result: tuple[Any, ...] = ("returned", _function(module, home, name)(*args, **kwargs))
        except BaseException as error:  # it is raised in the test
            result = ("raised", error, traceback.format_exc())
        ddp.shut_down()
        if dist.is_initialized():  # a process that failed leaves its group as it is
            dist.destroy_process_group()
        _forget_meshes()
        try:
            answer = pickle.dumps(result)
            pickle.loads(answer)
        except Exception as error:  # whatever its __reduce__ does
            answer = pickle.dumps(("raised", None, f"{error}: {result}"))
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(answer)


def _forget_meshes() -> None:
    """DTensor keeps plans by mesh: an equal mesh of the next call would use the groups of this one, which are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        if forget := getattr(debug, "_clear_sharding_prop_cache", None):  # torch 2.6 lacks it
            forget()


def _end_with_parent(parent: int) -> None:
    """End with the process of the tests, which the server that forked this one may outlive."""
    while psutil.pid_exists(parent):
        time.sleep(1)
    os._exit(1)

"""Functions run on several processes of this machine, which stay alive between tests (importing torch takes seconds).

    from kit.ranks import on_ranks

    def gradients(rows: int) -> list[float]:      # of a module that children can import: a test module or its helper
        strategy = DDP()
        strategy.setup()
        ...

    def test_gradients():
        assert on_ranks(2, gradients, 5) == [...]  # what each rank returned, in order of rank

Each call sets the variables that torchrun sets, with a port of its own, and ends with the process group destroyed. An
exception of a rank is raised here, the first one's, with its traceback as a note. A call that does not end within
`timeout` seconds ends the processes and fails.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

_pools: dict[int, _Pool] = {}


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback, `error` what it raised (None where that cannot be pickled)."""

    def __init__(self, rank: int, error: BaseException | None, text: str) -> None:
        super().__init__(f"rank {rank} raised:\n{text}")
        self.rank = rank
        self.error = error


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` on `world_size` processes; returns what each returned, in order of rank."""
    results = try_on_ranks(world_size, function, *args, timeout=timeout, **kwargs)
    for result in results:
        if isinstance(result, RankFailed):
            raise result
    return results


def try_on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> Any:
    """The same, with a `RankFailed` in place of what a rank that raised did not return."""
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool(function, args, kwargs, timeout)
    except BaseException:
        _pools.pop(world_size).end()
        raise


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Pool:
    """Processes that wait for work."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        with Listener(("127.0.0.1", 0), authkey=b"ranks") as listener:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-W", "error", "-m", "kit.ranks", str(listener.address[1])]
            self.processes = [subprocess.Popen(command, env=environment) for _ in range(world_size)]
            atexit.register(self.end)
            listener._listener._socket.settimeout(60)  # type: ignore[attr-defined]  # accept() has no limit of its own
            self.connections: list[Connection] = [listener.accept() for _ in range(world_size)]

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> list[Any]:
        port = free_port()
        home = Path(sys.modules[function.__module__].__file__ or "")
        for rank, connection in enumerate(self.connections):
            place = {
                "RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.world_size,
                "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            environment = {name: str(value) for name, value in place.items()}
            # Pickled here: a Connection's own way would share tensors by file descriptors.
            work = (environment, function.__module__, str(home), function.__qualname__, args, kwargs)
            connection.send_bytes(pickle.dumps(work))
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(timeout):
                raise AssertionError(f"rank {rank} of {self.world_size} does not end within {timeout} s")
            result = pickle.loads(connection.recv_bytes())
            results.append(RankFailed(rank, *result[1:]) if result[0] == "raised" else result[1])
        return results

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        atexit.unregister(self.end)


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


def _serve(port: int) -> None:
    import torch.distributed as dist

    from trainer_kit.strategies import ddp

    dist.set_debug_level(dist.DebugLevel.OFF)
    connection = Client(("127.0.0.1", port), authkey=b"ranks")
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            environment, module, home, name, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(environment)
        try:
            result: tuple[Any, ...] = ("returned", _function(module, home, name)(*args, **kwargs))
        except BaseException as error:  # it is raised in the test
            result = ("raised", error, traceback.format_exc())
        ddp.shut_down()
        if dist.is_initialized():  # a process that failed leaves its group as it is
            dist.destroy_process_group()
        try:
            answer = pickle.dumps(result)
            pickle.loads(answer)
        except Exception as error:  # whatever its __reduce__ does
            answer = pickle.dumps(("raised", None, f"{error}: {result}"))
        connection.send_bytes(answer)


def _end_with_parent(parent: int) -> None:
    import time

    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

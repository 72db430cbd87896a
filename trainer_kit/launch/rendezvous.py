"""Rendezvous of the launchers of several machines, and the announcement of failed ranks among them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.utils.units import format_duration

_PATIENCE_SECONDS = 5.0  # until the user sees which machine is missing
_ATTEMPT_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_NEWS_SECONDS = 1.0
_PARTING_SECONDS = 5.0
_FAILED, _HEARD = "trainer_kit/failed", "trainer_kit/heard"


class News(NamedTuple):
    """Announcement of another machine.

    Attributes:
        failure: The first failure of the run.
        goes_on: Whether that machine restarts its ranks.
    """

    failure: ProcessFailed
    goes_on: bool


class Machines:
    """Channel to the launchers of the other machines, through the store of the rendezvous."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._keeps_store = _keeps_store(config)
        self._next_look = 0.0
        self._store: Store | None = None

    def join(self, store: Store) -> None:
        """Use the empty store of a new rendezvous."""
        self._store = store

    def leave(self) -> None:
        """Release the store of the last rendezvous."""
        self._store = None

    def most(self, number: int, place: int, machines: int) -> int:
        """Return the maximum of the machines' numbers. Collective over machines.

        Args:
            number: Number of this machine.
            place: Index of this machine, from 0.
            machines: Number of machines.
        """
        store = self._reach()
        store.set(f"trainer_kit/number-{place}", str(number))
        return max(int(store.get(f"trainer_kit/number-{other}")) for other in range(machines))

    def announce(self, failure: ProcessFailed, goes_on: bool) -> None:
        """Announce a failed rank of this machine, unless another machine has announced one.

        Args:
            failure: The failure.
            goes_on: Whether this machine restarts its ranks.
        """
        if self._is_reachable():
            facts = [failure.message, failure.rank, failure.exit_code, failure.traceback, failure.tail]
            self._reach().compare_set(_FAILED, "", json.dumps([facts, goes_on]))
            self._part()

    def news(self, at_once: bool = False) -> News | None:
        """Return another machine's announcement since the rendezvous; None without one or without an answer.

        Args:
            at_once: Whether to look even if the last look was less than a second ago.
        """
        if self._config.num_nodes == 1 or (time.monotonic() < self._next_look and not at_once):
            return None
        self._next_look = time.monotonic() + _NEWS_SECONDS
        if not self._is_reachable() or not self._reach().check([_FAILED]):
            return None
        facts, goes_on = json.loads(self._reach().get(_FAILED))
        self._part()
        return News(ProcessFailed(*facts), goes_on)

    def _part(self) -> None:
        """Keep the store, on the machine that hosts it, until the others have read it."""
        store, deadline = self._reach(), time.monotonic() + _PARTING_SECONDS
        heard = store.add(_HEARD, 1)
        while self._keeps_store and heard < self._config.num_nodes and time.monotonic() < deadline:
            time.sleep(0.05)
            heard = store.add(_HEARD, 0)

    def _is_reachable(self) -> bool:
        """Return whether the store answers; a request to the store itself might block for long."""
        config = self._config
        if config.num_nodes == 1:
            return False
        return self._keeps_store or _address_towards(config.master_addr, config.port) is not None

    def _reach(self) -> Store:
        assert self._store is not None
        return self._store


class StaticRendezvous(StaticTCPRendezvous):
    """Rendezvous of machines with fixed numbers.

    Unlike torch's, it creates a new store for each start of the ranks, since the old one holds stale addresses. It
    reports which machine is missing, and takes a free port where none was chosen.

    Args:
        config: Launch configuration with the number of this machine.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the config comes from command-line options.
    """

    def __init__(
        self, config: LaunchConfig, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        address, seconds = config.master_addr, int(config.meeting_seconds) + 1
        super().__init__(address, config.port, config.node_rank, config.num_nodes, config.run_id, seconds)
        self._waiting = Waiting(config.meeting_seconds, say, is_stopped, by_command)
        self._number = "--node-rank " if by_command else "node_rank="
        self._start = b""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines.

        Returns:
            The store, this machine's number and the number of machines.

        Raises:
            OSError: If a machine does not come, or a port or address cannot be used; the message says which.
            ValueError: If two machines have the same number.
        """
        self._store = None
        store = self._listen() if self.rank == 0 else self._connect()
        self._store = store
        if store.add(f"arrived-{self.rank}", 1) > 1:
            raise ValueError(f"node_rank={self.rank} is not allowed; another machine has that number")
        try:
            for number in range(self.world_size):
                whom = f"machine {number} of {self.world_size} ({self._number}{number})"
                self._waiting.until(functools.partial(store.check, [f"arrived-{number}"]), whom)
        except RuntimeError as error:
            raise ConnectionError(f"machine 0 ({self.master_addr}) ended before all had come") from error
        info = RendezvousStoreInfo(self.master_addr, store.port)
        return RendezvousInfo(PrefixStore(self.run_id, store), self.rank, self.world_size, info)

    def _listen(self) -> TCPStore:
        try:
            store = self._tcp_store("127.0.0.1", is_master=True)
        except RuntimeError as error:
            _refuse_used_port(error, self.master_port)
            raise
        if self.world_size > 1 and _address_towards(self.master_addr, store.port) is None:
            raise OSError(
                f"master_addr={self.master_addr!r} does not lead to this machine, which has node_rank=0; give the "
                "address by which the other machines reach it"
            )
        store.set_timeout(self.timeout)
        store.set("start", uuid.uuid4().hex)
        return store

    def _connect(self) -> TCPStore:
        stores: list[TCPStore] = []

        def is_there() -> bool:
            if _address_towards(self.master_addr, self.master_port) is None:
                return False
            with contextlib.suppress(RuntimeError):  # the previous store may still be closing
                store = self._answering_store()
                if (start := store.get("start")) != self._start:
                    self._start = start
                    stores.append(store)
            return bool(stores)

        self._waiting.until(is_there, f"machine 0 at {self.master_addr}:{self.master_port} ({self._number}0)")
        stores[0].set_timeout(self.timeout)
        return stores[0]

    def _answering_store(self) -> TCPStore:
        """Return the store of machine 0, with a time limit: another program on that port never answers."""
        future: Future[TCPStore] = Future()

        def connect() -> None:
            try:
                future.set_result(self._tcp_store(self.master_addr, is_master=False))
            except RuntimeError as error:
                future.set_exception(error)

        threading.Thread(target=connect, daemon=True).start()
        if not concurrent.futures.wait([future], timeout=2 * _CONNECT_SECONDS).done:
            raise TimeoutError(
                f"what answers at {self.master_addr}:{self.master_port} is not the launcher of machine 0; check "
                "master_addr and master_port"
            )
        return future.result()

    def _tcp_store(self, address: str, is_master: bool) -> TCPStore:
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        return TCPStore(address, self.master_port, is_master=is_master, wait_for_workers=False, timeout=timeout)


class ElasticRendezvous(DynamicRendezvousHandler):
    """Rendezvous of machines in order of arrival, with a new store for each start of the ranks."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines."""
        self._bootstrap_store_info = None
        return super().next_rendezvous()


class Waiting:
    """Waits for other machines and reports which one is missing.

    Args:
        seconds: Longest wait.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the user gives command-line options, not arguments of a function.
    """

    def __init__(
        self, seconds: float, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        self._seconds = seconds
        self._longer = "--start-timeout" if by_command else f"rdzv_conf={{'timeout': {2 * max(1, int(seconds))}}}"
        self._say = say
        self._is_stopped = is_stopped

    def until(self, is_there: Callable[[], bool], whom: str) -> None:
        """Wait until `is_there()` returns True.

        Args:
            is_there: Condition to wait for.
            whom: Name of the missing machine, for messages.

        Raises:
            TimeoutError: If the wait exceeds its limit.
            InterruptedError: If `is_stopped()` returns True.
        """
        start, is_told = time.monotonic(), False
        while not is_there():
            waited = time.monotonic() - start
            if self._is_stopped():
                raise InterruptedError(f"a signal came while waiting for {whom}")
            if waited > self._seconds:
                raise TimeoutError(
                    f"{whom} did not answer within {format_duration(self._seconds)}; start it, check master_addr, "
                    f"master_port and the firewall, or wait longer with {self._longer}"
                )
            if waited > _PATIENCE_SECONDS and not is_told:
                self._say(f"waiting for {whom}, up to {format_duration(self._seconds)}")
                is_told = True
            time.sleep(0.1)


def make_rendezvous(
    config: LaunchConfig, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
) -> RendezvousHandler:
    """Create the rendezvous that `config` selects.

    Args:
        config: Launch configuration.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the config comes from command-line options.

    Raises:
        TimeoutError: If the address of a "c10d" rendezvous on another machine does not answer.
    """
    if config.rdzv_backend == "static":
        return StaticRendezvous(config, say, is_stopped, by_command)
    is_host = _keeps_store(config)
    address: str | None = config.master_addr
    if not is_host:
        whom = f"the first machine at {config.master_addr}:{config.port}"
        Waiting(config.meeting_seconds, say, is_stopped, by_command).until(
            lambda: _address_towards(config.master_addr, config.port) is not None, whom
        )
        address = _address_towards(config.master_addr, config.port)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{config.master_addr}:{config.port}",
        run_id=config.run_id,
        min_nodes=config.num_nodes,
        max_nodes=config.num_nodes,
        local_addr=address,
        **{**config.rdzv_conf, "is_host": str(is_host)},
    )
    try:
        backend, store = create_backend(parameters)
    except RendezvousConnectionError as error:
        _refuse_used_port(error.__cause__, config.port)
        raise
    handler: ElasticRendezvous = ElasticRendezvous.from_backend(
        config.run_id, store, backend, config.num_nodes, config.num_nodes, address,
        RendezvousTimeout(**_timeouts(config)), **_keep_alive(config),
    )  # fmt: skip
    return handler


def _timeouts(config: LaunchConfig) -> dict[str, timedelta]:
    """Return the timeouts of torch's dynamic rendezvous, by torch's names."""
    names = [name for name in ("last_call", "close", "heartbeat") if f"{name}_timeout" in config.rdzv_conf]
    given = {name: timedelta(seconds=float(config.rdzv_conf[f"{name}_timeout"])) for name in names}
    return {"join": timedelta(seconds=config.meeting_seconds), **given}


def _keep_alive(config: LaunchConfig) -> dict[str, int]:
    return {name: int(value) for name, value in config.rdzv_conf.items() if name.startswith("keep_alive")}


def _refuse_used_port(error: BaseException | None, port: int) -> None:
    if errno.errorcode[errno.EADDRINUSE] in str(error):
        raise OSError(
            f"master_port={port} is in use on this machine; end the other run, or choose another port (0 takes a free "
            "one where there is only one machine)"
        ) from error


def _address_towards(address: str, port: int) -> str | None:
    """Return this machine's address on the route to a port that answers; None if none does."""
    try:
        with socket.create_connection((address, port), timeout=_ATTEMPT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None


def _keeps_store(config: LaunchConfig) -> bool:
    """Return whether this machine hosts the store; if all machines have number 0, the address decides."""
    if "is_host" in config.rdzv_conf:
        return str(config.rdzv_conf["is_host"]).lower() in ("true", "1")
    is_first = config.node_rank == 0
    return is_first and (config.rdzv_backend == "static" or config.num_nodes == 1 or _is_own(config.master_addr))


def _is_own(address: str) -> bool:
    """Return whether `address` belongs to this machine."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True

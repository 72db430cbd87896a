"""The store that launchers meet at: which machine serves it, and how the others reach it."""

from __future__ import annotations

import concurrent.futures
import errno
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.utils.background import in_background

_ATTEMPT_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_REQUEST_SECONDS = 10.0
_AWAKE_SECONDS = 0.5

T = TypeVar("T")


def own_candidate(config: LaunchConfig) -> int | None:
    """Return the place of this machine among the candidates for the store; None if it is no candidate.

    A single candidate must have number 0, unless all machines have, and the address decides.
    """
    if "is_host" in config.rdzv_conf:
        return 0 if str(config.rdzv_conf["is_host"]).lower() in ("true", "1") else None
    if len(config.candidates) > 1:
        return next((place for place, address in enumerate(config.candidates) if _is_own(address)), None)
    is_first = config.node_rank == 0
    is_certain = config.rdzv_backend == "static" or config.num_nodes == 1
    return 0 if is_first and (is_certain or _is_own(config.candidates[0])) else None


def serve_store(config: LaunchConfig, address: str) -> TCPStore:
    """Serve the store on this machine.

    Args:
        config: Launch configuration.
        address: Address by which the other machines reach this one.

    Raises:
        OSError: If the port is in use, or the address leads elsewhere.
    """
    try:
        store = _tcp_store("127.0.0.1", config.port, is_master=True)
    except RuntimeError as error:
        if errno.errorcode[errno.EADDRINUSE] in str(error):
            raise OSError(
                f"master_port={config.port} is in use on this machine; end the other run, or choose another port (0 "
                "takes a free one where there is only one machine)"
            ) from error
        raise
    if config.num_nodes > 1 and not answers(address, store.port):
        raise OSError(
            f"master_addr={address!r} does not lead to this machine, which has node_rank=0; give the address by which "
            "the other machines reach it"
        )
    return store


def serve_free_port() -> TCPStore:
    """Serve another store on this machine, at a free port."""
    return _tcp_store("127.0.0.1", 0, is_master=True)


def connect_store(address: str, port: int, seconds: float = 2 * _CONNECT_SECONDS) -> TCPStore:
    """Connect to the store of another machine, with a time limit: another program on that port never answers.

    Args:
        address: Address of the machine.
        port: Port of the store.
        seconds: The limit.

    Raises:
        RuntimeError: If the connection fails.
        TimeoutError: If what answers is no store.
    """
    store = in_background(lambda: _tcp_store(address, port, is_master=False), "trainer_kit store")
    if not concurrent.futures.wait([store], timeout=seconds).done:
        raise TimeoutError(
            f"what answers at {address}:{port} is not the launcher of machine 0; check master_addr and master_port"
        )
    return store.result()


class LimitedStore(Store):
    """A client of a store whose requests end when the machine with the store falls silent.

    A `TCPStore` waits for the answer to a request without a limit. After a cut cable, that is until the system gives
    the connection up, a quarter of an hour later. Requests end in a `DistStoreError` here.

    Keep a reference to it as long as a `PrefixStore` uses it, which holds only the part of it that is not Python. One
    thread at a time may use it.

    Args:
        client: The client.
        seconds: Limit for the answer to a request; `get` and `wait` also wait for keys, see `set_timeout`.
    """

    def __init__(self, client: Store, seconds: float = _REQUEST_SECONDS) -> None:
        super().__init__()
        self._client = client
        self._seconds = seconds
        self.set_timeout(client.timeout)  # type: ignore[attr-defined]  # missing in the stub

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._ask(lambda: self._client.set(key, value))

    def get(self, key: str) -> bytes:
        """Return a value; wait for its key."""
        self.wait([key])
        return self._ask(lambda: self._client.get(key))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set a value if the present one is the expected one ("" for none), and return the one that is then there."""
        return self._ask(lambda: self._client.compare_set(key, expected_value, desired_value))

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return the sum."""
        return self._ask(lambda: self._client.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._ask(lambda: self._client.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        self._ask(lambda: self._client.wait(keys, limit), limit.total_seconds())

    def _ask(self, request: Callable[[], T], seconds: float = 0.0) -> T:
        answer = in_background(request, "trainer_kit request")
        limits = seconds + self._seconds, _AWAKE_SECONDS  # this process may have been stopped during the first
        if not any(concurrent.futures.wait([answer], timeout=limit).done for limit in limits):
            raise DistStoreError(f"the rendezvous store has not answered for {seconds + self._seconds:g} s")
        return answer.result()


def answers(address: str, port: int) -> bool:
    """Return whether something answers at an address; a request to a store itself might block for long."""
    try:
        socket.create_connection((address, port), timeout=_ATTEMPT_SECONDS).close()
    except OSError:
        return False
    return True


def _tcp_store(address: str, port: int, is_master: bool) -> TCPStore:
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    return TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _is_own(address: str) -> bool:
    """Return whether `address` belongs to this machine."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True

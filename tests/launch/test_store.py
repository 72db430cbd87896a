"""The store that launchers meet at."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from kit.ranks import free_port
from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.store import LimitedStore, answers, connect_store, own_candidate, serve_store

SERVER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def test_a_store_is_served_and_reached() -> None:
    store = serve_store(LaunchConfig(), "127.0.0.1")
    assert answers("127.0.0.1", store.port)
    other = connect_store("127.0.0.1", store.port)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_what_does_not_answer() -> None:
    assert not answers("127.0.0.1", free_port())
    assert not answers("nowhere.invalid", 1)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """A process that serves a store: its ID and its port."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def silent(server: tuple[int, int]) -> Iterator[LimitedStore]:
    """A client of that store, whose process is stopped."""
    process, port = server
    limited = LimitedStore(connect_store("127.0.0.1", port), seconds=0.3)
    limited.set("key", "")
    limited.set_timeout(timedelta(milliseconds=100))
    os.kill(process, signal.SIGSTOP)
    assert answers("127.0.0.1", port), "the system accepts connections for it"
    yield limited
    os.kill(process, signal.SIGCONT)


def test_a_limited_store_does_what_its_client_does() -> None:
    limited = LimitedStore(dist.HashStore(), seconds=5)
    store = PrefixStore("run", limited)  # whose C++ calls the methods of Python
    store.set("key", "value")
    assert store.get("key") == limited.get("run/key") == b"value"
    assert store.check(["key"])
    assert not store.check(["key", "other"])
    assert store.compare_set("key", "value", "next") == store.compare_set("key", "", "third") == b"next"
    assert [store.add("count", 2), store.add("count", 1)] == [2, 3]
    store.wait(["key", "count"], timedelta(seconds=1))
    store.multi_set(["first", "second"], ["1", "2"])
    assert store.multi_get(["first", "second"]) == [b"1", b"2"]
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError, match=r"(?i)timeout"):
        store.get("never")


@pytest.mark.parametrize(
    "request_",
    [
        lambda store: store.get("key"),
        lambda store: store.compare_set("key", "", ""),
        lambda store: store.add("count", 1),
        lambda store: store.check(["key"]),
        lambda store: store.wait(["key"], timedelta(milliseconds=100)),
    ],
    ids=["get", "compare_set", "add", "check", "wait"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="stops a process by a signal")
def test_a_request_ends_when_the_store_falls_silent(silent: LimitedStore, request_: Callable[[Store], object]) -> None:
    with pytest.raises(DistStoreError, match=r"has not answered for 0\.[34] s"):
        request_(PrefixStore("run", silent))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"master_port={port} is in use on this machine"):
            serve_store(LaunchConfig(master_port=port), "127.0.0.1")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, 0),
        ({"num_nodes": 2}, 0),
        ({"num_nodes": 2, "node_rank": 1}, None),
        ({"num_nodes": 2, "rdzv_backend": "c10d"}, 0),
        ({"num_nodes": 2, "rdzv_backend": "c10d", "master_addr": "192.0.2.1"}, None),
        ({"num_nodes": 3, "min_nodes": 2, "node_rank": 7}, None),
        ({"num_nodes": 2, "rdzv_backend": "c10d", "master_addr": "192.0.2.1", "rdzv_conf": {"is_host": True}}, 0),
        ({"num_nodes": 3, "min_nodes": 2, "master_addr": "192.0.2.1,127.0.0.1"}, 1),
        ({"num_nodes": 3, "min_nodes": 2, "master_addr": "192.0.2.1,198.51.100.1"}, None),
    ],
)
def test_which_machine_serves_it(fields: dict[str, object], place: int | None) -> None:
    assert own_candidate(LaunchConfig(**fields)) == place  # type: ignore[arg-type]

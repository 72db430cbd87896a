"""The store that launchers meet at."""

from __future__ import annotations

import socket

import pytest
from kit.ranks import free_port

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.store import answers, connect_store, own_candidate, serve_store


def test_a_store_is_served_and_reached() -> None:
    store = serve_store(LaunchConfig(), "127.0.0.1")
    assert answers("127.0.0.1", store.port)
    other = connect_store("127.0.0.1", store.port)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_what_does_not_answer() -> None:
    assert not answers("127.0.0.1", free_port())
    assert not answers("nowhere.invalid", 1)


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

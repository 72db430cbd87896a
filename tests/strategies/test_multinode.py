"""Machines whose disks are their own, played by processes with working folders of their own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from trainer_kit.strategies import multinode
from trainer_kit.strategies.multinode import MultiNode, route_to


def test_the_interface_is_the_one_that_leads_to_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "ib0": ["10.1.0.5", "fe80::1%ib0"], "eth0": ["10.0.0.5"]
    }  # fmt: skip
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {name: [SimpleNamespace(address=a) for a in cards[name]] for name in cards}
    )
    ways = {"main": "10.1.0.5", "self": "127.0.1.1", "six": "fe80::1", multinode._ANYWHERE: "10.0.0.5"}
    monkeypatch.setattr(multinode, "_address_towards", ways.get)
    assert route_to("main") == "ib0"
    assert route_to("six") == "ib0"
    assert route_to("self") == "eth0"  # Debian's /etc/hosts has the machine's own name at a loopback address
    assert route_to("nobody") == "eth0"
    del ways[multinode._ANYWHERE]
    assert route_to("self") is None


def test_the_address_towards_a_machine() -> None:
    assert multinode._address_towards("127.0.0.1") == "127.0.0.1"
    assert multinode._address_towards("no-such-machine.invalid") is None


@pytest.mark.parametrize("given", [None, "eth7"])
def test_an_interface_that_is_given_is_kept(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "main"}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(multinode, "route_to", lambda address: f"towards {address}")
    monkeypatch.setattr(multinode.DDP, "setup", lambda self: None)
    MultiNode(device="cpu").setup()
    assert os.environ["GLOO_SOCKET_IFNAME"] == (given or "towards main")


def test_one_process_needs_no_other_machine(tmp_path: Path) -> None:
    strategy = MultiNode(device="cpu")
    strategy.setup()
    strategy.session.find_writers(tmp_path)
    assert strategy.session.fetch_checkpoint(tmp_path) == tmp_path
    strategy.session.release_checkpoint_copies()
    strategy.teardown()
    assert list(tmp_path.iterdir()) == []
    assert "GLOO_SOCKET_IFNAME" not in os.environ

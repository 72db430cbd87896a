"""A machine asks the other candidates for the store which memberships they know."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest
from kit.ranks import free_port
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer_kit.launch import other_stores
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.keeper import MEMBERSHIP, Published
from trainer_kit.launch.membership import Membership
from trainer_kit.launch.other_stores import OtherStores
from trainer_kit.launch.store import serve_store

NOWHERE = "192.0.2.1"  # an address for documentation, which no machine has


@pytest.fixture
def store() -> TCPStore:
    return serve_store(LaunchConfig(), "127.0.0.1")


def published(addresses: Mapping[int, str], port: int, run_id: str = "run") -> dict[int, int]:
    return OtherStores(addresses, port, run_id).published(None)


def test_the_memberships_of_other_candidates(store: TCPStore) -> None:
    assert published({0: "127.0.0.1"}, store.port) == {}, "no keeper"
    PrefixStore("run", store).set(MEMBERSHIP, Published(Membership(7, ("id",), "run", ("host",))).to_json())
    assert published({0: "127.0.0.1", 2: "127.0.0.2", 3: NOWHERE}, store.port) == {0: 7, 2: 7}
    assert published({0: "127.0.0.1"}, store.port, "another run") == {}
    assert published({0: "127.0.0.1"}, free_port()) == {}
    assert published({}, free_port()) == {}


def test_a_silent_candidate_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once until it answers, which a later call returns."""
    answer, asked = threading.Event(), list[str]()

    def ask(address: str, port: int, run_id: str) -> int:
        asked.append(address)
        if address == NOWHERE:
            assert answer.wait(60)
        return 8

    monkeypatch.setattr(other_stores, "_published_at", ask)
    others = OtherStores({1: NOWHERE, 2: "127.0.0.1"}, 0, "run")
    assert others.published(0.2) == {2: 8}
    assert others.published(0.2) == {2: 8}
    assert sorted(asked) == ["127.0.0.1", "127.0.0.1", NOWHERE]
    answer.set()
    end = time.monotonic() + 60
    while others.published(0.2) != {1: 8, 2: 8}:
        assert time.monotonic() < end

"""A machine's connection to the store."""

from __future__ import annotations

import pytest
from kit.ranks import free_port
from torch._C._distributed_c10d import PrefixStore

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.keeper import MEMBERSHIP, Facts, Published, beat_key, machine_key
from trainer_kit.launch.link import Link, published_at
from trainer_kit.launch.membership import Membership
from trainer_kit.launch.store import serve_store


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore("run", serve_store(LaunchConfig(), "127.0.0.1"))


def port(store: PrefixStore) -> int:
    served: int = store.underlying_store.port
    return served


def test_a_machine_gives_signs_of_life(store: PrefixStore) -> None:
    first, second = (Link("127.0.0.1", port(store), "run", 0.01) for _ in range(2))
    assert (first.number, second.number) == (0, 1)
    assert first.is_alive()
    beats = store.add(beat_key(1), 0)
    while store.add(beat_key(1), 0) < beats + 3:
        pass
    facts = Facts("id", "host", (Membership(2, ("id",), "run", ("host",)),), has_claimed=True)
    second.announce(facts)
    assert Facts.from_json(store.get(machine_key(1))) == facts
    for link in (first, second):
        link.stop()


def test_the_membership_of_another_candidate(store: PrefixStore) -> None:
    assert published_at("127.0.0.1", port(store), "run") is None, "no keeper"
    store.set(MEMBERSHIP, Published(Membership(7, ("id",), "run", ("host",))).to_json())
    assert published_at("127.0.0.1", port(store), "run") == 7
    assert published_at("127.0.0.1", port(store), "another run") is None
    assert published_at("127.0.0.1", free_port(), "run") is None

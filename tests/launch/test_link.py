"""A machine's connection to the store."""

from __future__ import annotations

import pytest
from kit.ranks import free_port
from torch._C._distributed_c10d import PrefixStore

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.keeper import MEMBERSHIP, PRESENCE, Facts, Published, beat_key, machine_key
from trainer_kit.launch.link import Link, published_at
from trainer_kit.launch.membership import Membership, Readiness
from trainer_kit.launch.presence import Presence
from trainer_kit.launch.store import serve_store


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore("run", serve_store(LaunchConfig(), "127.0.0.1"))


def port(store: PrefixStore) -> int:
    served: int = store.underlying_store.port
    return served


def test_a_machine_gives_signs_of_life(store: PrefixStore) -> None:
    presence = Presence()
    first = Link("127.0.0.1", port(store), "run", 0.01, serves=True)
    store.set(PRESENCE, str(presence.port))
    second = Link("127.0.0.1", port(store), "run", 0.01)
    assert (first.number, second.number) == (0, 1)
    assert first.is_alive()
    beats = store.add(beat_key(1), 0)
    while store.add(beat_key(1), 0) < beats + 3:
        pass
    past = Membership(2, ("id",), "run", ("host",))
    facts = Facts("id", "host", (past,), has_claimed=True, readiness=Readiness.READY)
    second.announce(facts)
    assert Facts.from_json(store.get(machine_key(1))) == facts
    assert Facts.from_json(store.get(machine_key(1))).readiness is Readiness.READY
    store.set(MEMBERSHIP, Published(past).to_json())
    assert second.published().membership == past
    for link in (first, second):
        link.stop()
    while not presence.ended:
        pass
    assert [*presence.ended] == [1]
    presence.close()


def test_the_memberships_of_other_candidates(store: PrefixStore) -> None:
    assert published_at(["127.0.0.1"], port(store), "run") == [None], "no keeper"
    store.set(MEMBERSHIP, Published(Membership(7, ("id",), "run", ("host",))).to_json())
    assert published_at(["127.0.0.1", "127.0.0.2", "192.0.2.1"], port(store), "run") == [7, 7, None]
    assert published_at(["127.0.0.1"], port(store), "another run") == [None]
    assert published_at(["127.0.0.1"], free_port(), "run") == [None]
    assert published_at([], free_port(), "run") == []

"""A machine's connection to the store."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kit.clock import Clock
from torch._C._distributed_c10d import PrefixStore

from trainer_kit.launch import link as links
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.link import Chance, Link
from trainer_kit.launch.membership import Membership, Readiness
from trainer_kit.launch.news import CHANGE, OPEN, Change
from trainer_kit.launch.presence import Presence
from trainer_kit.launch.published import MEMBERSHIP, PRESENCE, Facts, Published, beat_key, machine_key
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


def test_a_store_that_has_not_answered_is_not_asked_at_once_again(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question to a machine that is cut off takes seconds."""
    clock, asked, does_answer = Clock(), list[str](), False

    def answers(address: str, port: int) -> bool:
        asked.append(address)
        return does_answer

    own = Link("127.0.0.1", port(store), "run", 0.01, serves=True)
    monkeypatch.setattr(links, "answers", answers)
    monkeypatch.setattr(links.time, "monotonic", clock.monotonic)
    assert not own.is_alive()
    does_answer = True
    clock.now += 4
    assert not own.is_alive()
    assert len(asked) == 1
    clock.now += 2
    assert own.is_alive()
    assert own.is_alive()
    assert len(asked) == 3
    own.stop()


def test_what_a_machine_that_waits_can_expect(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = Clock(), Link("127.0.0.1", port(store), "run", 0.01, serves=True)
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=lambda seconds: None))
    running = Published(Membership(7, ("id",), "run", ("host",)), numbers=(5,))
    assert own.chance(running._replace(numbers=(5, own.number)), may_join=False) is Chance.PLACE
    assert own.chance(running, may_join=False) is Chance.NONE
    assert own.chance(running, may_join=True) is Chance.LATER
    clock.now += 9
    assert own.chance(running, may_join=True) is Chance.LATER, "the training may have just begun"
    clock.now += 2
    assert own.chance(running, may_join=True) is Chance.NONE, "some never open"
    keys = PrefixStore("7", own.store)
    keys.set(OPEN, "digest")
    assert own.chance(running, may_join=True) is Chance.OPEN
    keys.set(CHANGE, Change("a machine joins", is_joining=True).to_json())
    clock.now += 1000
    assert own.chance(running, may_join=True) is Chance.LATER, "as long as the change takes"
    following = running._replace(membership=running.membership._replace(number=8))
    assert own.chance(following, may_join=True) is Chance.LATER, "each has a moment of its own"
    PrefixStore("8", own.store).set(OPEN, "")
    assert own.chance(following, may_join=True) is Chance.NONE
    own.stop()

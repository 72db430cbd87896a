"""The store that a machine meets the others at: the first that answers, its own, or a better one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.ranks import free_port

from trainer_kit.launch import meeting_store
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.meeting_store import MeetingStore

LOOPBACKS = "127.0.0.1", "127.0.0.2", "127.0.0.3"
Make = Callable[..., MeetingStore]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Returns a function that makes the store of a machine with one of the candidates' addresses."""
    port, made = free_port(), list[MeetingStore]()

    def make(own: int | None, candidates: tuple[str, ...] = LOOPBACKS, **others: Any) -> MeetingStore:
        # All addresses are this machine's, so that the place among the candidates has to be given.
        monkeypatch.setattr(meeting_store, "own_candidate", lambda config: own)
        config = LaunchConfig(
            master_addr=",".join(candidates), master_port=port, num_nodes=3, min_nodes=1, last_call=1.0, cpu=True
        )
        made.append(MeetingStore(config))
        return made[-1]

    yield make
    for each in reversed(made):
        each.leave()


def test_the_first_candidate_serves_the_store_of_a_new_run(make: Make) -> None:
    """Another one serves none, since the first may only be late."""
    first, second, other = make(0), make(1), make(None)
    assert [second.find(0), other.find(0)] == [False, False]
    assert first.find(0)
    assert [second.find(0), other.find(0)] == [True, True]
    assert [each.served is not None for each in (first, second, other)] == [True, False, False]
    assert {each.address for each in (first, second, other)} == {LOOPBACKS[0]}
    assert [each.is_candidate for each in (first, second, other)] == [True, True, False]
    assert [each.number for each in (first, second, other)] == [1, 1, 1]
    assert all(each.answers() for each in (first, second, other))


def test_the_next_candidate_serves_a_store_where_the_first_is_lost(make: Make) -> None:
    """Only for a run that has begun, in which they have met."""
    first, second, other = make(0), make(1), make(None)
    assert all([first.find(0), second.find(0), other.find(0)])
    first.leave()
    for each in (second, other):
        assert not each.answers()
        each.leave()
    assert not other.find(1), "it is no candidate"
    assert second.find(1)
    assert other.find(1)
    assert [second.served is not None, other.served is not None] == [True, False]
    assert second.address == LOOPBACKS[1]
    assert (second.number, other.number) == (2, 2)


def test_a_machine_comes_to_a_store_with_a_newer_membership(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first candidate's, which has an older one; once they have met, no store is preferred."""
    one, two = make(0), make(1)
    assert two.find(3)
    monkeypatch.setattr(one._others, "published", lambda patience: {1: 5})
    assert not one.has_better(5)
    assert one.has_better(3)
    assert one.find(3)
    assert (one.served, one.address) == (None, LOOPBACKS[1])
    one.leave()
    two.leave()
    one.settle()
    monkeypatch.setattr(one._others, "published", lambda patience: {})
    assert one.find(5)
    assert one.served is not None


def test_a_machine_without_rights_looks_for_others_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves no store itself."""
    one, two = make(0), make(1)
    assert two.find(3)
    monkeypatch.setattr(one._others, "published", lambda patience: {1: 3})
    assert not one.find_better(3)
    monkeypatch.setattr(one._others, "published", lambda patience: {1: 4})
    assert one.find_better(3)
    assert (one.served, one.address) == (None, LOOPBACKS[1])


def test_the_ranks_of_two_memberships_have_a_store_each(make: Make) -> None:
    store = make(0)
    ports = [store._serve_ranks() for _ in range(3)]
    assert len(set(ports)) == 3
    assert [server.port for server in store._rank_servers] == ports[1:]

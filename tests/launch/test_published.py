"""What machines and the keeper write into the store, and the sentences made of it."""

from __future__ import annotations

import pytest

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.membership import Membership, Readiness, Right
from trainer_kit.launch.published import End, Facts, Here, Published

FIRST = Membership(1, ("id-a", "id-b"), "run", ("a", "b"))
SECOND = Membership(2, ("id-a", "id-c"), "run", ("a", "c"))


@pytest.mark.parametrize("end", [None, *End])
def test_facts_come_back_from_their_text(end: End | None) -> None:
    facts = Facts("id-a", "a", (FIRST, SECOND), True, True, end, Readiness.READY, stays=True)
    assert Facts.from_json(facts.to_json()) == facts
    assert type(Facts.from_json(facts.to_json()).end) is type(end)


def test_memberships_come_back_from_their_text() -> None:
    published = Published(SECOND, (0, 2), (FIRST,), Right.FIRST_HALF, ("b",), ("c",), 4000)
    assert Published.from_json(published.to_json()) == published
    assert Published.from_json(Published().to_json()) == Published()
    here = Here(2, ("a",), 3, True, may_follow=False)
    assert Here.from_json(here.to_json()) == here


@pytest.mark.parametrize(
    ("candidates", "then"),
    [
        ("a", "if the one at a is lost, which serves the store, the others wait up to 1 min for it"),
        ("a,b,c", "a serves the store, and if it is lost, the next one of b, c"),
    ],
)
def test_a_run_begins_with_a_sentence(candidates: str, then: str) -> None:
    config = LaunchConfig(num_nodes=3, min_nodes=1, master_addr=candidates, start_timeout=60.0, cpu=True)
    assert Published(FIRST).describe(config) == [f"2 of 3 machines, 1 are enough; {then}"]
    fixed = LaunchConfig(num_nodes=2, master_addr="a", cpu=True)
    assert Published(FIRST).describe(fixed) == []


@pytest.mark.parametrize(
    ("gone", "joined", "change"),
    [
        (("b",), ("c",), "b is gone and c has joined"),
        (("b", "d"), (), "b, d are gone"),
        ((), ("c", "d"), "c, d have joined"),
    ],
)
def test_a_change_has_a_sentence(gone: tuple[str, ...], joined: tuple[str, ...], change: str) -> None:
    config = LaunchConfig(num_nodes=3, min_nodes=1, cpu=True)
    published = Published(SECOND, bases=(FIRST,), gone=gone, joined=joined)
    assert published.describe(config) == [f"{change}: 2 of 3 machines continue"]
    assert Published(SECOND, bases=(FIRST,)).describe(config) == [], "all have come again"


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (Here(1, ("a",), 2, has_first=True, may_follow=True), "a machine (1 of at least 2 came)"),
        (Here(1, ("b",), 2, may_follow=False), "the other machines, since b is 1 of 2, without the first one"),
        (Here(2, ("a", "own"), 5, True, False), "the other machines, since this machine and a are 2 of 5"),
        (Here(0, (), 3, may_follow=False), "the other machines, since none of 3 machines has come"),
    ],
)
def test_who_is_missing(here: Here, expected: str) -> None:
    assert here.missing("own", LaunchConfig(num_nodes=3, min_nodes=2, cpu=True)) == expected

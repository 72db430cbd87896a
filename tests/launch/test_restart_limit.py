"""How many failures a run survives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.clock import Clock

from trainer_kit.launch.restart_limit import FailureHistory, RestartLimit


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        (3, RestartLimit(3), "3"),
        ("0", RestartLimit(0), "0"),
        ("5/1h", RestartLimit(5, 3600), "5 within 1 h"),
        ("2 / 30 min", RestartLimit(2, 1800), "2 within 30 min"),
        ("1/s", RestartLimit(1, 1), "1 within 1 s"),
        ("4/2d", RestartLimit(4, 172800), "4 within 2 d"),
    ],
)
def test_a_limit_is_read(text: Any, limit: RestartLimit, shown: str) -> None:
    assert RestartLimit.parse(text) == limit
    assert str(limit) == shown


@pytest.mark.parametrize("text", [-1, "", "5/", "5/0h", "0/1h", "5/1w", "1.5", "5/1h ago", True])
def test_what_is_no_limit_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"max_restarts=.* is not allowed; give a whole number of at least 0, or"):
        RestartLimit.parse(text)


def test_failures_within_a_time_count() -> None:
    clock = Clock()
    history = FailureHistory(RestartLimit(2, 60), clock.monotonic)
    for second in (0, 30, 59):
        clock.now = 1000.0 + second
        history.record()
    assert history.count == 3
    clock.now = 1000.0 + 61
    assert history.count == 2
    clock.now = 1000.0 + 120
    assert history.count == 0


def test_all_count_without_a_time() -> None:
    clock = Clock()
    history = FailureHistory(RestartLimit(2), clock.monotonic)
    history.record()
    clock.now += 1e9
    assert history.count == 1


@pytest.mark.parametrize(
    ("limit", "before", "step", "at_start", "goes_on", "words"),
    [
        (RestartLimit(2), 1, None, None, True, "restart 2 of 2"),
        (RestartLimit(2), 1, 5, 5, True, "restart 2 of 2, from the checkpoint of step 5"),
        (RestartLimit(1, 3600), 1, 9, 5, False, "this is failure 2, and --max-restarts allows 1 within 1 h"),
        (RestartLimit(1), 1, 9, 5, True, "restart 2, more than max_restarts=1, since there is a newer"),
        (RestartLimit(1), 1, 5, 5, False, "1 restarts are made, and no checkpoint is newer than that of step 5"),
        (RestartLimit(1), 1, None, None, False, "1 restarts are made, and no checkpoint is written since the last"),
    ],
)
def test_whether_to_restart(
    limit: RestartLimit, before: int, step: int | None, at_start: int | None, goes_on: bool, words: str
) -> None:
    history = FailureHistory(limit)
    for _ in range(before):
        history.record()
    decided, said = history.decide(step, at_start)
    assert decided == goes_on
    assert said.startswith(words)


@pytest.mark.parametrize(
    ("earlier", "host", "words"),
    [
        ("bcb", "b", "; 3 of the 4 failures were on b"),
        ("bbb", "c", "; 3 of the 4 failures were on b"),
        ("bb", "b", "; 3 of the 3 failures were on b"),
        ("bcc", "b", ""),
        ("bc", "d", ""),
        ("b", "c", ""),
        (["", ""], "", ""),
    ],
)
def test_the_machine_with_most_failures_is_named_at_the_end(earlier: Sequence[str], host: str, words: str) -> None:
    for limit, reason in ((RestartLimit(1, 3600), " within 1 h"), (RestartLimit(1), " since the last")):
        history = FailureHistory(limit)
        for each in earlier:
            history.record(each)
        goes_on, said = history.decide(None, None, host)
        assert not goes_on
        assert said.endswith(reason + words)


def test_failures_of_a_machine_are_forgotten_with_their_time() -> None:
    clock = Clock()
    history = FailureHistory(RestartLimit(1, 60), clock.monotonic)
    for host in "cccb":
        history.record(host)
        clock.now += 25
    _, said = history.decide(None, None, "b")
    assert said.endswith("; 2 of the 3 failures were on b")


@given(
    st.lists(st.lists(st.tuples(st.floats(0, 100), st.sampled_from("bc")), max_size=4), max_size=3), st.floats(1, 50)
)
def test_a_machine_that_came_later_learns_of_earlier_failures(
    told: list[list[tuple[float, str]]], waited: float
) -> None:
    clock = Clock()
    history = FailureHistory(RestartLimit(2, 60), clock.monotonic)
    history.merge(told)
    longest = max([[], *told], key=len)
    assert history.count == sum(age < 60 for age, _ in longest)
    clock.now += waited
    assert history.count == sum(age + waited < 60 for age, _ in longest)
    assert [each.host for each in history.past()] == [host for age, host in longest if age + waited < 60]

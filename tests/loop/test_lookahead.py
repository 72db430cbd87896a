"""Batches of an evaluation, fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_kit.loop.lookahead import EvalBatch, Lookahead, one_behind
from trainer_kit.loss.batch import Counts


def test_batches_come_once_in_their_order_whenever_they_are_fetched() -> None:
    read: list[int] = []

    def batches() -> Iterator[EvalBatch]:
        for number in range(4):
            read.append(number)
            yield EvalBatch(number, Counts(1, 1, 1, 1))

    ahead = Lookahead(batches())
    assert (next(ahead).batch, read) == (0, [0])
    ahead.fetch()
    assert read == [0, 1]
    assert next(ahead).batch == 1
    assert [each.batch for each in ahead] == [2, 3]
    ahead.fetch()  # there is none left
    assert [*ahead] == []


def test_an_outcome_comes_after_the_next_pass_has_begun() -> None:
    events: list[str] = []

    def passes() -> Iterator[str]:
        for name in "abc":
            events.append(f"pass {name}")
            yield name

    for name in one_behind(passes()):
        events.append(f"take {name}")
    assert events == ["pass a", "pass b", "take a", "pass c", "take b", "take c"]
    assert [*one_behind(iter(()))] == []

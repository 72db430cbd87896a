"""An evaluation over a stream: each sample once, dealt out in turn, and a digest that shows what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.streams import Plain

from trainer_kit.data.collate import stack
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.sampling import Layout
from trainer_kit.data.stream_evaluation import StreamEvaluation

SEED = 5


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_each_sample_once_and_always_the_same(workers: int) -> None:
    def evaluated() -> list[list[list[float]]]:
        reading = LoaderConfig(stack, SEED, workers)
        found = list(StreamEvaluation(Plain(11), Layout(4), reading))
        assert sum(counts.samples for _, counts, _ in found) == 11
        return [batch["x"].tolist() for batch, _, _ in found]

    torch.manual_seed(1)
    first = evaluated()
    torch.manual_seed(2)
    assert evaluated() == first
    assert sorted(int(row[0]) for batch in first for row in batch) == list(range(11))
    assert {row[2] for batch in first for row in batch} == {-7.0}  # no epoch begins


@settings(max_examples=50)
@given(st.integers(0, 20), st.integers(1, 4), st.integers(2, 3))
def test_evaluation_is_dealt_in_turn(length: int, size: int, processes: int) -> None:
    def evaluated(layout: Layout) -> list[Any]:
        found = list(StreamEvaluation(Plain(length), layout, LoaderConfig(stack, SEED)))
        assert [len(batch["x"]) for batch, _, _ in found] == [counts.samples for _, counts, _ in found]
        numbers.append(len(found))
        dummies = [is_dummy for *_, is_dummy in found]
        assert not any(dummies[:-1])
        return [batch["x"].tolist() for batch, _, is_dummy in found if not is_dummy]

    numbers: list[int] = []
    alone = evaluated(Layout(size))
    for rank in range(processes):
        assert evaluated(Layout(size, 1, processes, rank)) == alone[rank::processes]
    assert {*numbers[1:]} == {-(-numbers[0] // processes)}, "all processes have as many"


class Moved(Plain):
    """Begins with another sample."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self.mine():
            yield self.sample((index + 1) % self.length)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_fingerprint_is_that_of_all_samples(workers: int) -> None:
    def fingerprint(dataset: Plain, processes: int, rank: int) -> int:
        batches = StreamEvaluation(dataset, Layout(2, 1, processes, rank), LoaderConfig(stack, SEED, workers))
        assert batches.fingerprint == 0
        for _ in range(2):
            list(batches)
            found = batches.fingerprint
        return found

    assert fingerprint(Plain(7), 1, 0) == 0
    assert fingerprint(Plain(7), 2, 0) == fingerprint(Plain(7), 2, 1) != fingerprint(Moved(7), 2, 1)

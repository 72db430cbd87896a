from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.layouts import layouts

from trainer_kit.data import map_loader
from trainer_kit.data.collate import stack
from trainer_kit.data.map_loader import (
    LoaderConfig,
    MicroBatch,
    TrainLoader,
    evaluation_batches,
    sample_lengths,
)
from trainer_kit.data.sampling import Layout, permutation
from trainer_kit.errors import DataError
from trainer_kit.loss.batch import Counts

SEED = 5


class Counting(torch.utils.data.Dataset[Any]):
    """Counts, over all processes, how often each sample is read."""

    def __init__(self, length: int, noisy: bool = False) -> None:
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        noise = torch.rand(()).double() + np.random.rand() + random.random() if self.noisy and index % 5 else 0.0
        return {"x": torch.tensor([index, float(noise)], dtype=torch.float64), "labels": torch.tensor(index % 3)}


def reading(workers: int = 0, collate: Any = stack) -> LoaderConfig:
    return LoaderConfig(collate, SEED, workers)


def loader(dataset: Any, layout: Layout, workers: int = 0, **options: Any) -> TrainLoader:
    return TrainLoader(dataset, layout, reading(workers), **options)


def indices(micro_batches: list[MicroBatch]) -> list[int]:
    return [index for micro in micro_batches for index in micro.indices]


def noises(micro_batches: list[MicroBatch]) -> dict[int, float]:
    rows = [row for micro in micro_batches for row in micro.batch["x"].tolist()]
    return {int(index): noise for index, noise in rows}


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_before_the_position_is_read(workers: int) -> None:
    dataset, layout = Counting(50), Layout(2, 2)
    order = permutation(50, SEED, 3)
    micro_batches = list(loader(dataset, layout, workers).micro_batches(3, 20, 4))
    assert indices(micro_batches) == order[20:36].tolist()
    assert dataset.reads.nonzero().flatten().tolist() == sorted(order[20:36].tolist())
    assert dataset.reads.sum() == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_late_reads_no_more_than_resuming_early(workers: int) -> None:
    layout = Layout(2, 2)
    reads = []
    for step in (10, 10_000):
        dataset = Counting(50_000)
        micro_batches = loader(dataset, layout, workers).micro_batches(0, step * layout.global_batch_size, 3)
        first = next(micro_batches)
        assert first.start == step * layout.global_batch_size
        if workers == 0:
            assert dataset.reads.sum() == layout.global_batch_size  # one step's, to be counted
        list(micro_batches)
        reads.append(int(dataset.reads.sum()))
    assert reads == [12, 12]


def test_resuming_in_a_late_epoch_reads_nothing_of_those_before() -> None:
    dataset = Counting(30)
    micro_batches = loader(dataset, Layout(4)).micro_batches(1000, 28, 2)
    assert next(micro_batches).indices == permutation(30, SEED, 1000)[28:].tolist()
    assert dataset.reads.sum() == 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_same_for_any_workers_and_after_a_resume(workers: int) -> None:
    layout = Layout(3, 2)
    expected = list(loader(Counting(32, noisy=True), layout).micro_batches(0, 0, 14))  # over two epochs and on
    for skipped, epoch, position in [(0, 0, 0), (4, 0, 24), (6, 1, 0)]:
        torch.manual_seed(skipped)
        rest = list(loader(Counting(32, noisy=True), layout, workers).micro_batches(epoch, position, 14 - skipped))
        wanted = expected[-len(rest) :]
        assert [each.global_batch.stop for each in rest] == [each.global_batch.stop for each in wanted]
        for one, other in zip(rest, wanted, strict=True):
            assert (one.indices, one.start, one.index, one.is_last) == (
                other.indices, other.start, other.index, other.is_last
            )  # fmt: skip
            assert torch.equal(one.batch["x"], other.batch["x"])
            assert torch.equal(one.batch["labels"], other.batch["labels"])


@settings(max_examples=25)
@given(
    layouts(9, 4, 3, full=st.none() | st.integers(1, 4)),
    st.integers(0, 31),
)
def test_samples_are_the_same_in_any_layout(layout: Layout, position: int) -> None:
    expected = noises(list(loader(Counting(32, noisy=True), Layout(32)).micro_batches(0, 0, 1)))
    found = {}
    for rank in range(layout.readers):
        one = loader(Counting(32, noisy=True), layout._replace(reader=rank))
        found |= noises(list(one.micro_batches(0, position, one.steps_left(0, position))))
    assert found == {index: expected[index] for index in permutation(32, SEED, 0)[position:].tolist()}


def test_workers_collate_with_the_same_randomness() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return stack(samples) | {"masked": torch.rand(len(samples)) < 0.3}

    def masks(workers: int) -> list[torch.Tensor]:
        one = TrainLoader(Counting(24), Layout(4), reading(workers, collate))
        return [micro.batch["masked"] for micro in one.micro_batches(0, 8, 10)]

    expected = masks(0)
    assert len({tuple(mask.tolist()) for mask in expected}) > 2
    for workers in (1, 2):
        assert all(torch.equal(*pair) for pair in zip(masks(workers), expected, strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_leave_this_process_its_generators(workers: int) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    list(loader(Counting(10, noisy=True), Layout(2), workers).micro_batches(0, 0, 5))
    list(evaluation_batches(Counting(10, noisy=True), Layout(2), reading(workers)))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


class Lost:
    """Cannot be taken over from a worker, as a tensor cannot whose worker was killed."""

    def __reduce__(self) -> Any:
        return _not_there, ()


def _not_there() -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


def test_a_worker_that_ends_while_it_hands_over_a_batch_is_told_of() -> None:
    lost = TrainLoader(Counting(4), Layout(2), reading(1, lambda samples: Lost()))
    with pytest.raises(DataError, match="a DataLoader worker ended while it handed over a batch"):
        list(lost.micro_batches(0, 0, 1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
@pytest.mark.parametrize("in_fork", [True, False])
def test_workers_leave_whose_process_was_killed_while_they_started(in_fork: bool) -> None:
    """Before they look who that is, or after that and before torch does."""
    script = (
        "import os, signal, threading, time\n"
        "from trainer_kit.data.map_loader import LoaderConfig, from_workers\n"
        f"if {in_fork}: os.register_at_fork(after_in_child=lambda: time.sleep(1))\n"
        f"wait = None if {in_fork} else lambda number: time.sleep(1)\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "list(from_workers(list(range(100)), LoaderConfig(list, 0, workers=2, worker_init_fn=wait)))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True, env=environment
    )
    try:
        process.communicate(timeout=60)  # until nobody holds the pipe any more
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@settings(max_examples=50)
@given(
    st.integers(1, 40),
    layouts(6, 4, 3, full=st.none() | st.integers(1, 4)),
)
def test_a_step_is_counted_whole_before_its_first_batch_is_worked_on(length: int, layout: Layout) -> None:
    windows = []
    for rank in range(layout.readers):
        one = loader(Counting(length), layout._replace(reader=rank))
        micro_batches = list(one.micro_batches(0, 0, one.steps_left(0, 0)))
        per_step: dict[int, list[MicroBatch]] = {}
        for micro in micro_batches:
            per_step.setdefault(micro.global_batch.stop, []).append(micro)
        for step in per_step.values():
            assert all(micro.global_batch is step[0].global_batch for micro in step)
            assert [micro.index for micro in step] == list(range(len(step)))
            assert [micro.is_last for micro in step] == [False] * (len(step) - 1) + [True]
            assert (
                sum(micro.counts.samples for micro in step)
                == step[0].global_batch.samples
                == step[0].global_batch.labels
            )
            assert all(micro.counts.samples in (0, len(micro.indices)) for micro in step)
        windows.append([step[0].global_batch for step in per_step.values()])
    assert sum(window.samples for rank in windows for window in rank) == length
    assert [window.closes_epoch for window in windows[0]] == [False] * (len(windows[0]) - 1) + [True]


def test_a_stand_in_counts_nothing() -> None:
    dataset = Counting(5)
    micro_batches = list(loader(dataset, Layout(4, readers=2, reader=1)).micro_batches(0, 0, 1))
    assert [micro.counts.samples for micro in micro_batches] == [1]
    micro_batches = list(loader(dataset, Layout(5, readers=2, reader=1)).micro_batches(0, 0, 1))
    assert [(micro.counts, len(micro.indices)) for micro in micro_batches] == [(Counts(0, 0, 0, 0), 2)]


def test_tokens_and_labels_are_counted() -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        rows = torch.tensor([[1, 2, 3, 0], [1, 0, 0, 0]])
        return {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": rows.where(rows > 0, -100)}

    one = TrainLoader(Counting(4), Layout(2, 2), reading(0, collate))
    window = next(one.micro_batches(0, 0, 1)).global_batch
    assert (window.samples, window.tokens, window.labels, window.shifted) == (4, 8, 8, 4)


def test_steps_stop_where_they_should_though_the_epoch_goes_on() -> None:
    dataset = Counting(20)
    micro_batches = list(loader(dataset, Layout(3, 2)).micro_batches(0, 0, 5))  # 6, 6, 6, 2 and 6 of the next epoch
    assert [(micro.global_batch.epoch, micro.global_batch.stop) for micro in micro_batches if micro.is_last] == [
        (0, 6), (0, 12), (0, 18), (0, 20), (1, 6),
    ]  # fmt: skip
    assert dataset.reads.sum() == 26
    assert list(loader(dataset, Layout(3)).micro_batches(0, 0, 0)) == []


def test_each_epoch_has_an_order_of_its_own() -> None:
    micro_batches = list(loader(Counting(40), Layout(40)).micro_batches(0, 0, 3))
    orders = [micro.indices for micro in micro_batches]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_is_named_with_the_index(workers: int) -> None:
    class Broken(Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 13:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    order = permutation(20, SEED, 0).tolist()
    micro_batches = loader(Broken(20), Layout(1), workers).micro_batches(0, 0, 20)
    for _ in range(order.index(13)):  # all that come before are given out
        next(micro_batches)
    with pytest.raises(DataError, match="the dataset raised at index 13: OSError: the disk is gone"):
        next(micro_batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_stacked_say_so_from_a_worker_too(workers: int) -> None:
    others = {*multiprocessing.active_children()}  # of tests before
    ragged = [{"x": torch.ones(1 + index)} for index in range(4)]
    with pytest.raises(ValueError, match=r"samples cannot be stacked into a batch \(column 'x'\)"):
        list(loader(ragged, Layout(2), workers).micro_batches(0, 0, 1))
    assert others.issuperset(multiprocessing.active_children())  # ended at once, though the error is still held


def test_datasets_that_hold_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="train_dataset is empty"):
        loader(Counting(0), Layout(2))
    with pytest.raises(ValueError, match="dataloader_drop_last=True leaves nothing of 5 samples in batches of 6"):
        loader(Counting(5), Layout(2, readers=3), drop_last=True)
    assert loader(Counting(6), Layout(2, readers=3), drop_last=True).epoch_length == 6


def test_drop_last_leaves_the_last_batch_out() -> None:
    one = loader(Counting(11), Layout(4), drop_last=True)
    assert one.epoch_length == 8
    assert one.steps_left(0, 0) == 2
    micro_batches = list(one.micro_batches(0, 0, 3))
    assert [len(micro.indices) for micro in micro_batches] == [4, 4, 4]
    assert [micro.global_batch.closes_epoch for micro in micro_batches] == [False, True, False]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_copy_of_the_dataset_is_told_of_the_epoch(workers: int) -> None:
    class Told(Counting):
        epoch = -7

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"epoch": torch.tensor(self.epoch)}

    micro_batches = list(loader(Told(12), Layout(4), workers).micro_batches(2, 8, 5))
    told = [micro.batch["epoch"].unique().tolist() for micro in micro_batches]
    assert told == [[micro.global_batch.epoch] for micro in micro_batches] == [[2], [3], [3], [3], [4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_each_sample_once_and_always_the_same(workers: int) -> None:
    dataset = Counting(11, noisy=True)
    batches = [list(evaluation_batches(dataset, Layout(4), reading(workers))) for _ in range(2)]
    assert [counts.samples for _, counts, _ in batches[0]] == [4, 4, 3]
    assert torch.cat([batch["x"] for batch, _, _ in batches[0]])[:, 0].tolist() == list(range(11))
    for (one, *_), (other, *_) in zip(*batches, strict=True):
        assert torch.equal(one["x"], other["x"])
    reference, *_ = next(evaluation_batches(Counting(11, noisy=True), Layout(11), reading(0)))
    assert torch.equal(torch.cat([batch["x"] for batch, _, _ in batches[0]]), reference["x"])


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, [2, 4, 8, 16, 16, 14]), (1.0, [2] * 30)])
def test_more_small_batches_are_read_at_once_while_reading_is_quick(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[int]
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(map_loader.time, "perf_counter", lambda: next(clock) * seconds)
    monkeypatch.setattr(map_loader, "batches_at_once", lambda collate, batch, samples: 8)
    dataset, reads = Counting(60), []
    for _ in evaluation_batches(dataset, Layout(2), reading(), reads_several=True):
        reads.append(int(dataset.reads.sum()) - sum(reads))
    assert [number for number in reads if number] == expected


def test_evaluation_of_nothing_gives_nothing_and_idle_ranks_get_a_dummy_batch() -> None:
    assert list(evaluation_batches(Counting(0), Layout(4), reading())) == []
    ((batch, _, is_dummy),) = evaluation_batches(Counting(3), Layout(4, readers=2, reader=1), reading())
    assert is_dummy
    assert batch["x"][:, 0].tolist() == [0, 1]


class Columns(list[Any]):
    """A dataset with columns, as the datasets library has them."""

    column_names = ("input_ids", "length")

    def __getitem__(self, key: Any) -> Any:
        return [row["length"] for row in self] if key == "length" else super().__getitem__(key)


def test_lengths_come_from_the_column_or_the_tokens() -> None:
    rows = [{"input_ids": [0] * length, "length": 2 * length} for length in (3, 1, 2)]
    assert sample_lengths(rows).tolist() == [3, 1, 2]
    assert sample_lengths(Columns(rows)).tolist() == [6, 2, 4]
    speech = [{"input_values": [0.0] * length} for length in (2, 3)]
    assert sample_lengths(speech, column="input_values").tolist() == [2, 3]
    shown = {"columns 'x'": [{"x": 1}], "no columns": [1], "columns 'input_ids'": [{"input_ids": 5}]}
    for found, bad in shown.items():
        message = f"group_by_length=True needs samples that are dicts with 'input_ids', .*; the first one has {found}"
        with pytest.raises(ValueError, match=message):
            sample_lengths(bad)


def test_grouping_by_length_does_not_depend_on_the_layout() -> None:
    rows = [{"input_ids": torch.zeros(1 + index % 17)} for index in range(60)]
    orders = []
    for layout in (Layout(1), Layout(7, 2), Layout(60)):
        one = TrainLoader(rows, layout, reading(0, lambda samples: {"x": torch.ones(len(samples))}), False, "input_ids")
        orders.append(indices(list(one.micro_batches(0, 0, one.steps_left(0, 0)))))
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(60))
    sizes = [len(rows[index]["input_ids"]) for index in orders[0]]
    falls = sum(one < other for one, other in itertools.pairwise(sizes))
    assert falls <= 3  # between the four groups


@settings(max_examples=50)
@given(
    layouts(5, 3, 3),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 12)), max_size=3),
)
def test_what_is_passed_over_is_not_even_read(layout: Layout, ranges: list[tuple[int, int, int]]) -> None:
    passed_over = [(epoch, start, start + size) for epoch, start, size in ranges]
    dataset, found = Counting(30), list[int]()
    for rank in range(layout.readers):
        one = loader(dataset, layout._replace(reader=rank))
        one.passed_over = passed_over
        steps = one.steps_left(0, 0) + one.steps_left(1, 0)
        micro_batches = list(one.micro_batches(0, 0, steps))
        assert all(micro.global_batch.epoch < 2 for micro in micro_batches)
        assert all(micro.global_batch.start <= micro.start < micro.global_batch.stop for micro in micro_batches)
        found += indices([micro for micro in micro_batches if micro.counts.samples])
    expected = [
        index
        for epoch in range(2)
        for place, index in enumerate(permutation(30, SEED, epoch).tolist())
        if not any(number == epoch and start <= place < stop for number, start, stop in passed_over)
    ]
    assert sorted(found) == sorted(expected)
    assert set(dataset.reads.nonzero().flatten().tolist()) == set(expected)


def test_the_order_of_an_epoch_is_freed_before_that_of_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    make = TrainLoader.order

    def observed(loader: TrainLoader, epoch: int) -> torch.Tensor:
        assert not [order for order in alive if order() is not None]
        order = make(loader, epoch)
        alive.append(weakref.ref(order))
        return order

    monkeypatch.setattr(TrainLoader, "order", observed)
    loader = TrainLoader(Counting(6), Layout(2), LoaderConfig(stack, SEED))
    assert len([*loader.micro_batches(0, 2, 8)]) == 8
    assert len(alive) == 3

"""Prepared loaders in one process: their order, their randomness, and where they go on."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer_kit.accelerator import Accelerator, PreparedLoader, set_seed, skip_first_batches
from trainer_kit.data.sampling import mix, permutation


class Noisy(Dataset[Any]):
    """Sample i is i and something drawn from all three generators, and from one of the dataset's own."""

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.own = random.Random()
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(())), self.own.random()])

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class NoisyStream(IterableDataset[Any]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            yield torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))])


def prepared(seed: int = 0, dataset: Any = None, **options: Any) -> PreparedLoader:
    set_seed(seed)
    options = {"batch_size": 3, **options}
    loader: PreparedLoader = Accelerator(cpu=True).prepare(
        DataLoader(Noisy() if dataset is None else dataset, **options)
    )
    return loader


def indices(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def everything(batches: Any) -> list[list[list[float]]]:
    return [batch.tolist() for batch in batches]


def drawn_next() -> list[float]:
    """What the global generators give next."""
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def test_order_is_a_function_of_seed_and_epoch() -> None:
    loader = prepared(shuffle=True)
    passes = [indices(loader) for _ in range(3)]
    assert all(sorted(order) == list(range(20)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    again = prepared(shuffle=True)
    torch.rand(100)  # the state of the global generator has no part in it
    again.set_epoch(1)
    assert indices(again) == passes[1]
    assert indices(again) == passes[2]
    assert indices(prepared(seed=1, shuffle=True)) != passes[0]


def test_order_is_the_one_of_a_seeded_generator() -> None:
    generator = torch.Generator().manual_seed(11)
    loader = prepared(shuffle=True, generator=generator)
    assert indices(loader) == permutation(20, mix(11, 0), 0).tolist()
    assert indices(loader) == permutation(20, mix(11, 0), 1).tolist()
    assert indices(prepared(seed=5, sampler=RandomSampler(Noisy(), generator=torch.Generator().manual_seed(11)))) == (
        permutation(20, mix(11, 0), 0).tolist()
    )


def test_two_loaders_are_not_shuffled_alike() -> None:
    accelerator = Accelerator(cpu=True)
    loaders = accelerator.prepare(*(DataLoader(Noisy(), batch_size=3, shuffle=True) for _ in range(2)))
    assert indices(loaders[0]) != indices(loaders[1])


def test_without_shuffling() -> None:
    loader = prepared()
    assert indices(loader) == list(range(20))
    assert indices(loader) == list(range(20))
    assert len(loader) == 7
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (3, 3, 20)
    assert isinstance(loader.dataset, Noisy)
    assert loader.dataset.epochs == [0, 1]
    assert len(prepared(drop_last=True)) == 6
    assert indices(prepared(drop_last=True)) == list(range(18))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Noisy, NoisyStream])
def test_the_global_generators_stay_as_they_are(workers: int, dataset: Any) -> None:
    loader = prepared(dataset=dataset(), num_workers=workers, shuffle=dataset is Noisy)
    set_seed(3)
    expected = drawn_next()
    set_seed(3)
    list(loader)
    assert drawn_next() == expected


def test_what_is_random_in_reading_does_not_depend_on_workers() -> None:
    alone = prepared(shuffle=True)
    passes = [everything(alone) for _ in range(2)]
    assert passes[0] != passes[1]
    for options in ({"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        loader = prepared(shuffle=True, **options)
        assert [everything(loader) for _ in range(2)] == passes
    rows = [tuple(row[1:]) for batch in passes[0] for row in batch]
    assert len(set(rows)) == len(rows)
    unshuffled = prepared()
    assert everything(unshuffled) != everything(unshuffled)  # each epoch has its own


def fork_rng() -> float:
    """Draws, and leaves the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand(()))


def fail_at_times() -> float:
    if random.random() < 0.3:
        raise KeyError("at times")
    return 0.0


DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "normal": np.random.standard_normal,
    "torch": lambda: float(torch.rand(())),
    "torch, kept": fork_rng,
    "the seed": torch.initial_seed,
    "an error": fail_at_times,
}


class Drawing(Dataset[Any]):
    """Draws from one generator for the samples from 9 on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor([index, DRAWS[self.name]() if index >= 9 else 0], dtype=torch.float64)


def seen_by(loader: Any) -> list[Any]:
    """The batches, the numbers that a loop draws between them, and the error that ends the pass."""
    seen: list[Any] = []
    try:
        for batch in loader:
            seen.append((batch.tolist(), drawn_next(), np.random.standard_normal()))
    except KeyError as error:
        seen.append(type(error))
    return seen


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_is_read_once_in_each_pass_and_leaves_the_loops_generators(name: str) -> None:
    data = Drawing(name)
    loader, others = prepared(dataset=data, shuffle=True), prepared(dataset=Drawing("nothing"), shuffle=True)
    set_seed(3)
    seen = [seen_by(loader) for _ in range(2)]
    set_seed(3)
    undrawn = [seen_by(others) for _ in range(2)]
    if name != "an error":
        assert data.reads == 2 * 20
    for ours, theirs in zip(seen, undrawn, strict=True):
        between = [each[1:] for each in ours if each is not KeyError]
        assert between == [each[1:] for each in theirs[: len(between)]]


def test_workers_seed_where_something_draws_as_one_process_does() -> None:
    for name in ("nothing", "normal", "torch, kept"):
        alone = everything(prepared(dataset=Drawing(name), shuffle=True))
        assert everything(prepared(dataset=Drawing(name), shuffle=True, num_workers=1)) == alone


def test_persistent_workers_after_a_broken_pass() -> None:
    loader = prepared(num_workers=2, persistent_workers=True)
    for _ in loader:
        break
    assert indices(loader) == list(range(20))
    assert loader._workers is not None
    workers = loader._workers
    assert indices(loader) == list(range(20))
    assert loader._workers is workers


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Noisy, NoisyStream])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("style", ["plain", "skip"])
def test_goes_on_in_the_middle_of_a_pass(dataset: Any, workers: int, style: str) -> None:
    options = {"num_workers": workers, "shuffle": dataset is Noisy}
    if dataset is NoisyStream and workers:
        workers = options["num_workers"] = 1  # several would give the samples several times
    loader = prepared(dataset=dataset(), **options)
    list(loader)
    state, whole = {}, []
    for number, batch in enumerate(loader, start=1):
        whole.append(batch.tolist())
        if number == 3:
            state = copy.deepcopy(loader.state_dict())
    following = everything(loader)
    other = prepared(seed=99, dataset=dataset(), **options)  # the seed comes from the state
    other.load_state_dict(state)
    assert other.epoch == 1
    rest = everything(other if style == "plain" else skip_first_batches(other, 3))
    assert rest == whole[3:]
    assert everything(other) == following


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_have_worked_before_a_load(persistent: bool) -> None:
    options = {"shuffle": True, "num_workers": 1, "persistent_workers": persistent}
    loader = prepared(**options)
    state = copy.deepcopy(loader.state_dict())
    first = everything(loader)
    other = prepared(seed=7, **options)
    assert everything(other) != first
    other.load_state_dict(state)
    assert everything(other) == first


def left(loader: PreparedLoader, skip: int | None = None) -> list[int]:
    """The samples of the next pass after a save and a load."""
    other = prepared(shuffle=True)
    other.load_state_dict(copy.deepcopy(loader.state_dict()))
    return indices(other if skip is None else skip_first_batches(other, skip))


@pytest.mark.slow
def test_where_a_pass_goes_on() -> None:
    orders = [permutation_of(epoch) for epoch in range(4)]
    loader = prepared(shuffle=True)
    assert left(loader) == orders[0]
    assert left(loader, 2) == orders[0][6:]
    for number, _ in enumerate(loader, start=1):
        if number == 2:
            assert left(loader) == orders[0][6:]
            assert left(loader, 2) == orders[0][6:]
            assert left(loader, 4) == orders[0][12:]  # counted from the beginning, not from where it stands
            assert left(loader, 0) == orders[0]
        if number == 7:  # the last batch: nothing is left of the pass
            assert left(loader) == []
            assert left(loader, 7) == []
            assert left(loader, 0) == orders[1]
    assert left(loader) == orders[1]
    assert left(loader, 2) == orders[1][6:]
    for number, _ in enumerate(loader, start=1):
        if number == 2:
            break
    # Broken off by the loop itself, which would begin the next pass: that is what a resume does. With exactly as
    # many batches to skip as were read, somebody goes on with the old one.
    assert left(loader) == orders[2]
    assert left(loader, 2) == orders[1][6:]
    assert left(loader, 3) == orders[2][9:]
    assert indices(loader) == orders[2]
    assert indices(loader) == orders[3]


def permutation_of(epoch: int) -> list[int]:
    loader = prepared(shuffle=True)
    loader.set_epoch(epoch)
    return indices(loader)


def test_a_state_that_was_loaded_is_saved_again() -> None:
    loader = prepared(shuffle=True)
    for number, _ in enumerate(loader, start=1):
        if number == 2:
            state = copy.deepcopy(loader.state_dict())
    other = prepared(shuffle=True)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert left(other) == permutation_of(0)[6:]


def test_set_epoch_keeps_what_was_loaded() -> None:
    loader = prepared(shuffle=True)
    for number, _ in enumerate(loader, start=1):
        if number == 2:
            state = copy.deepcopy(loader.state_dict())
    for epoch, expected in [(0, permutation_of(0)[6:]), (3, permutation_of(3))]:
        other = prepared(shuffle=True)
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert indices(other) == expected
        assert other.epoch == epoch + 1


def test_skipping_reads_no_sample_that_is_left_out() -> None:
    class Counting(Noisy):
        read: list[int] = []  # noqa: RUF012

        def __getitem__(self, index: int) -> torch.Tensor:
            self.read.append(index)
            return super().__getitem__(index)

    loader = prepared(dataset=Counting())
    assert indices(skip_first_batches(loader, 5)) == [15, 16, 17, 18, 19]
    assert Counting.read == [15, 16, 17, 18, 19]
    skipped = skip_first_batches(skip_first_batches(loader, 2), 3)
    assert (len(skipped), skipped.batch_size) == (2, 3)
    assert indices(skipped) == [15, 16, 17, 18, 19]
    with pytest.raises(ValueError, match="num_batches=-1 is negative"):
        skip_first_batches(loader, -1)


def test_skipping_batches_of_any_loader() -> None:
    loader = DataLoader(torch.arange(10), batch_size=2)  # type: ignore[arg-type]
    skipped = skip_first_batches(loader, 3)
    assert [batch.tolist() for batch in skipped] == [[6, 7], [8, 9]]
    assert len(skipped) == 2


def test_another_batch_size_goes_on_at_the_same_sample(caplog: pytest.LogCaptureFixture) -> None:
    loader = prepared(shuffle=True, batch_size=4)
    for number, _ in enumerate(loader, start=1):
        if number == 3:
            state = copy.deepcopy(loader.state_dict())
    order = permutation_of(0)
    other = prepared(shuffle=True, batch_size=2)
    other.load_state_dict(state)
    assert indices(other) == order[12:]
    assert not caplog.records
    other = prepared(shuffle=True, batch_size=5)
    other.load_state_dict(state)
    assert indices(other) == order[10:]
    assert "batches have 5 samples now, 4 before: some are seen again" in caplog.text


class Own(Sampler[int]):
    """Draws from the global generator, and is told of epochs."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Endless:
    """Batches without an end or a length."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [1, 2]


class Keys(Dataset[Any]):
    def __getitem__(self, key: str) -> str:
        return key * 2


def test_own_samplers() -> None:
    sampler = Own()
    loader = prepared(sampler=sampler)
    passes = [indices(loader) for _ in range(2)]
    assert passes[0] != passes[1]
    assert [sorted(order) for order in passes] == [list(range(20))] * 2
    assert sampler.epochs == [0, 1]
    again = prepared(sampler=Own())
    again.set_epoch(1)
    assert indices(again) == passes[1]
    weighted = prepared(sampler=WeightedRandomSampler([1.0] * 20, 20))
    rows = everything(weighted)
    noise: dict[int, set[float]] = {}
    for batch in rows:
        for row in batch:
            noise.setdefault(int(row[0]), set()).add(row[1])
    assert any(len(values) > 1 for values in noise.values())  # a sample drawn twice is not augmented alike
    assert everything(weighted) != rows
    batches = [["a", "b"], ["c"]]
    keyed = prepared(dataset=Keys(), batch_sampler=batches, batch_size=1)
    assert list(keyed) == [["aa", "bb"], ["cc"]]
    endless = prepared(batch_sampler=Endless(), batch_size=1)
    for number, batch in enumerate(endless):
        assert indices([batch]) == [1, 2]
        if number == 5:
            break


def test_without_batches() -> None:
    loader = prepared(batch_size=None)
    assert [int(row[0]) for row in loader] == list(range(20))
    assert len(loader) == 20
    lists = prepared(dataset=torch.arange(10) * 2, batch_size=None, sampler=[[0, 1], [2]])
    assert [batch.tolist() for batch in lists] == [[0, 2], [4]]


class Backwards(DataLoader[Any]):
    """A loader that iterates in a way of its own."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_loaders_that_iterate_in_their_own_way() -> None:
    set_seed(0)
    loader = Accelerator(cpu=True).prepare(Backwards(Noisy(), batch_size=5, shuffle=True))
    passes = [indices(loader) for _ in range(2)]
    set_seed(0)
    again = Accelerator(cpu=True).prepare(Backwards(Noisy(), batch_size=5, shuffle=True))
    again.set_epoch(1)
    assert passes[0] != passes[1] == indices(again)


def test_datasets_that_read_many_samples_at_once() -> None:
    class Table(Noisy):
        def __getitems__(self, wanted: list[int]) -> list[torch.Tensor]:
            return [torch.tensor([index * 10]) for index in wanted]

    assert indices(prepared(dataset=Table())) == list(range(0, 200, 10))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_is_raised_as_it_is(workers: int) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 4:
                raise KeyError("no such file")
            return super().__getitem__(index)

    loader = prepared(dataset=Broken(), num_workers=workers)
    with pytest.raises(KeyError, match="no such file"):
        list(loader)
    assert not loader._flow.loaders


def test_a_loop_in_a_loop() -> None:
    """An evaluation in the middle of an epoch does not end the step of the training loop."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    outer, inner = accelerator.prepare(*(DataLoader(Noisy(4), batch_size=1) for _ in range(2)))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    synced = []
    for _ in outer:
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
        for _ in inner:
            assert accelerator.flow.loaders == [outer, inner]
    assert synced == [False, False, True, True]  # the last batch ends a step
    assert not accelerator.flow.loaders
    synced = []
    for _ in outer:
        for _ in inner:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True, True] * 4  # that of the inner loader


def test_batches_of_evaluation_are_told_from_those_of_training() -> None:
    """`no_grad` inside the loop, a loop within the training loop, one that is left early, and two loaders at once."""
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(22, 4))
    train: Any = DataLoader(data, batch_size=4)
    held_out: Any = DataLoader(data, batch_size=8)
    other: Any = DataLoader(TensorDataset(torch.randn(6, 3, 4)), batch_size=1)
    model, optimizer, train, held_out, other = accelerator.prepare(model, optimizer, train, held_out, other)
    for (inputs,), (more,) in zip(train, other, strict=True):
        accelerator.backward(model(inputs).mean() + model(more).mean())
        optimizer.step()
        optimizer.zero_grad()
        for (batch,) in held_out:
            with torch.no_grad():
                model(batch)
            if len(batch) == 6:
                break
    shapes = accelerator.strategy.shapes
    rows = {
        kind: [(each.columns["0"][0], each.count) for each in shapes.of(kind)] for kind in ("training", "evaluation")
    }
    assert rows["training"] == [((4, 4), 5), ((1, 3, 4), 6), ((2, 4), 1)]
    assert rows["evaluation"] == [((8, 4), 12), ((6, 4), 6)]


def test_advice_is_for_a_loop_written_by_hand() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(4, 1)
    samples = [torch.randn(length, 4) for length in (3, 3, 40, 40, 70)]
    collate = functools.partial(pad_sequence, batch_first=True)
    train, held_out = (DataLoader(samples, batch_size=size, collate_fn=collate) for size in (2, 3))  # type: ignore[arg-type]
    model, train, held_out = accelerator.prepare(model, train, held_out)
    for batch in train:
        accelerator.backward(model(batch).mean())
    for batch in held_out:
        with torch.no_grad():
            model(batch)
    advice = accelerator.strategy.shapes.advice()
    assert "Batches came in 3 shapes in training and 2 in evaluation" in advice
    assert "give the DataLoader drop_last=True, which leaves out the batch that is not full" in advice
    assert "take a batch_size that divides the number of samples" in advice
    assert "in the DataLoader's collate_fn, with a tokenizer by pad_to_multiple_of=" in advice
    for name in ("dataloader_drop_last", "per_device", "pad_to_lengths", "data_collator", "strategy='xla'"):
        assert name not in advice

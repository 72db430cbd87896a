from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, MicroBatch
from trainer_kit.data.reader import COMPARED
from trainer_kit.data.sampling import Layout

LENGTH = 200


class Numbers(IterableDataset[Any]):
    """Numbers in order, with a state that brings them back; each worker has every so manieth."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.epoch = 0
        self.place = 0
        self.reads = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.place * step < self.length:
            self.place += 1
            self.reads += 1
            yield 1000 * self.epoch + first + (self.place - 1) * step
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in self.numbers():
            yield {"x": torch.tensor(number)}

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Buffered(Numbers):
    """Shuffles in a buffer, whose content its state does not hold."""

    size = 50

    def numbers(self) -> Iterator[int]:
        generator, buffer = random.Random(self.epoch), list[int]()
        for number in super().numbers():
            buffer.append(number)
            if len(buffer) == self.size:
                yield buffer.pop(generator.randrange(self.size))
        generator.shuffle(buffer)
        yield from buffer


class HalfBuffered(Numbers):
    """Loses what it had ahead where it is resumed, as a reader in a thread of its own does."""

    def numbers(self) -> Iterator[int]:
        source = super().numbers()
        ahead = [next(source, None) for _ in range(3)]
        while ahead[0] is not None:
            number = ahead.pop(0)
            ahead.append(next(source, None))
            yield number


class Stateless(IterableDataset[Any]):
    """The same buffer without a state."""

    def __init__(self, length: int = LENGTH) -> None:
        self.inner = Buffered(length)

    def set_epoch(self, epoch: int) -> None:
        self.inner.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.inner.place = 0
        return iter(self.inner)


class Global(Stateless):
    """Its order hangs on the global generators, which are seeded before each batch."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.inner.place = 0
        buffer: list[int] = []
        for number in Numbers.numbers(self.inner):
            buffer.append(number)
            if len(buffer) == 20:
                yield {"x": torch.tensor(buffer.pop(random.randrange(20)))}
        yield from ({"x": torch.tensor(number)} for number in buffer)


INEXACT: list[Callable[..., Any]] = [Buffered, HalfBuffered, Stateless, Global]


def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample["x"] for sample in samples])}


def steps_of(
    dataset: Any, layout: Layout, workers: int, steps: int, after: MicroBatch | None = None
) -> list[MicroBatch]:
    epoch, position, state = 0, 0, None
    if after is not None:
        epoch, position, state = after.global_batch.epoch, after.global_batch.stop, after.global_batch.data_state
    loader = StreamLoader(dataset, layout, LoaderConfig(collated, 5, workers))
    return list(loader.micro_batches(epoch, position, steps, state))


def numbers_in(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [micro.batch["x"].tolist() for micro in micro_batches]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", INEXACT)
def test_a_state_that_loses_samples_is_found_out_and_they_are_read_again(
    kind: Callable[..., Any], workers: int
) -> None:
    whole = steps_of(kind(), Layout(4), workers, 80)
    for taken in (20, 49, 70) if workers == 0 else (40,):
        with pytest.warns(UserWarning, match=f"samples of epoch {taken // 50} are read again and skipped") as caught:
            rest = steps_of(kind(), Layout(4), workers, 80 - taken, whole[taken - 1])
        assert numbers_in(rest) == numbers_in(whole[taken:])
        assert [micro.global_batch.stop for micro in rest] == [micro.global_batch.stop for micro in whole[taken:]]
        assert len([each for each in caught if issubclass(each.category, UserWarning)]) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_brings_all_back_costs_the_few_samples_that_verify_it(workers: int) -> None:
    whole = steps_of(Numbers(10_000), Layout(4), workers, 60)
    dataset = Numbers(10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = steps_of(dataset, Layout(4), workers, 10, whole[49])
    assert numbers_in(rest) == numbers_in(whole[50:])
    if workers == 0:
        assert dataset.reads <= 2 * COMPARED + 4 * 11  # of the 200 before; one batch is read ahead


@pytest.mark.parametrize("kind", [Numbers, *INEXACT])
def test_processes_find_the_place_together(kind: Callable[..., Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = steps_of(kind(), Layout(4, 2), 0, 20)
        ranks = [steps_of(kind(), Layout(4, 1, 2, rank), 0, 10) for rank in range(2)]
        again = [steps_of(kind(), Layout(4, 1, 2, rank), 0, 10, ranks[0][9]) for rank in range(2)]
    dealt = [batch for pair in zip(*map(numbers_in, again), strict=True) for batch in pair]
    assert dealt == numbers_in(alone)[20:40]
    assert len(caught) == (kind is not Numbers)  # the main process alone says it


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 150),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([Numbers, Buffered, HalfBuffered, Stateless]),
)
def test_however_often_it_is_resumed_with_other_batch_sizes_each_sample_comes_in_its_place(
    length: int, starts: list[tuple[int, int]], kind: Callable[..., Any]
) -> None:
    expected = [number for batch in numbers_in(steps_of(kind(length), Layout(length), 0, 1)) for number in batch]
    found, after = list[int](), None
    for size, steps in starts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            taken = steps_of(kind(length), Layout(size), 0, steps, after)
        here = [micro for micro in taken if micro.global_batch.epoch == 0]
        found += [number for batch in numbers_in(here) for number in batch]
        assert found == expected[: len(found)]
        after = here[-1]
        if after.global_batch.closes_epoch:
            assert found == expected
            return


def test_samples_that_do_not_come_again_are_a_resume_that_is_not_exact() -> None:
    class Moody(Stateless):
        starts = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            Moody.starts += 1
            return ({"x": torch.tensor(number + Moody.starts)} for number in range(LENGTH))

    first = steps_of(Moody(), Layout(4), 0, 10)
    with (
        pytest.warns(UserWarning, match="40 samples of epoch 0 are read again"),
        pytest.warns(UserWarning, match="gives other samples in epoch 0 than before: this resume is not exact"),
    ):
        steps_of(Moody(), Layout(4), 0, 3, first[-1])


class FirstIsMoody(Stateless):
    """The first worker gives other samples at each start, the last one the same."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        start = int(torch.empty((), dtype=torch.int64).random_(generator=_fresh())) if worker.id == 0 else 0
        return ({"x": torch.tensor(number + start)} for number in range(worker.id, LENGTH, worker.num_workers))


def _fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def test_one_worker_of_several_may_be_inexact() -> None:
    first = steps_of(FirstIsMoody(), Layout(4), 2, 10)
    with (
        pytest.warns(UserWarning, match="are read again"),
        pytest.warns(UserWarning, match="this resume is not exact"),
    ):
        rest = steps_of(FirstIsMoody(), Layout(4), 2, 3, first[-1])
    assert len(rest) == 3


def test_samples_that_cannot_be_compared_are_read_again() -> None:
    class Opaque(Numbers):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return ({"x": sample["x"], "close": lambda: None} for sample in super().__iter__())

    whole = steps_of(Opaque(), Layout(4), 0, 30)
    with pytest.warns(UserWarning, match="cannot be compared, so that its state cannot be verified: 80 samples"):
        rest = steps_of(Opaque(), Layout(4), 0, 10, whole[19])
    assert numbers_in(rest) == numbers_in(whole[20:])


def test_a_stream_of_datasets_with_a_buffer_somewhere_is_known_by_its_parts() -> None:
    class BufferShuffledExamplesIterable:
        pass

    class Interleaved:
        ex_iterables = (object(), BufferShuffledExamplesIterable())

    class Mapped:
        ex_iterable = Interleaved()

    class Rare(Numbers):
        """Its buffer would not show in the next samples."""

        _ex_iterable = Mapped()

    whole = steps_of(Rare(), Layout(4), 0, 30)
    with pytest.warns(UserWarning, match="does not hold its shuffle buffer: 80 samples"):
        rest = steps_of(Rare(), Layout(4), 0, 10, whole[19])
    assert numbers_in(rest) == numbers_in(whole[20:])

from __future__ import annotations

import itertools
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kit.layouts import kept, layouts
from kit.streams import Plain
from xxhash import xxh3_64

from trainer_kit.data.collate import stack
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, MicroBatch
from trainer_kit.data.sampling import Layout
from trainer_kit.data.source import ReadyBatches
from trainer_kit.data.stream_evaluation import StreamEvaluation
from trainer_kit.errors import DataError

SEED = 5


class Undivided(Plain):
    """All samples in each worker."""

    def mine(self) -> range:
        return range(self.length)


class Stateful(Plain):
    """Goes on where its state says; as usual, it begins anew once it has ended."""

    place = 0
    reads = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        mine = self.mine()
        while self.place < len(mine):
            self.place += 1
            self.reads += 1
            yield self.sample(mine[self.place - 1])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def loader(dataset: Any, layout: Layout, workers: int = 0, **options: Any) -> StreamLoader:
    return StreamLoader(dataset, layout, LoaderConfig(stack, SEED, workers), **options)


def state_at(place: int) -> dict[str, Any]:
    """A state with no sample to compare, after one batch."""
    mark = {"batches": 1, "dataset": {"place": place}}
    reader = {"batches": [[1, place]], "ended": False, "mark": mark, "digest": xxh3_64().hexdigest()}
    return {"workers": [reader], "turn": 0}


def rows(micro_batches: list[MicroBatch]) -> list[list[list[float]]]:
    return [micro.batch["x"].tolist() for micro in micro_batches]


def samples(micro_batches: list[MicroBatch]) -> list[int]:
    return [int(row[0]) for batch in rows(micro_batches) for row in batch]


def resumed_at(dataset: Any, layout: Layout, workers: int, steps: int, stop: MicroBatch) -> list[MicroBatch]:
    """The rest, as a new process would read it after the step that `stop` ends."""
    window = stop.global_batch
    epoch, position, state = window.epoch, window.stop, window.data_state
    if window.closes_epoch:
        epoch, position, state = epoch + 1, 0, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of passing over: has its own test
        return list(loader(dataset, layout, workers).micro_batches(epoch, position, steps, state))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_resumed_at_any_step_it_gives_the_same_batches(kind: type[Plain], workers: int) -> None:
    layout, steps = Layout(3, 2), 8  # 19 samples: steps of 6, 6, 6, 1, and with two workers of 10 and 9
    whole = list(loader(kind(19), layout, workers).micro_batches(0, 0, steps))
    ends = [place for place, micro in enumerate(whole) if micro.is_last]
    assert len(ends) == steps
    for taken, place in enumerate(ends, start=1):
        if workers and taken not in (1, 3, 4, 6):
            continue  # workers are slow to start
        torch.manual_seed(taken)
        rest = resumed_at(kind(19), layout, workers, steps - taken, whole[place])
        assert rows(rest) == rows(whole[place + 1 :])
        assert [micro.global_batch.data_state for micro in rest] == [
            micro.global_batch.data_state for micro in whole[place + 1 :]
        ]
        assert [(m.index, m.is_last, m.global_batch.stop) for m in rest] == [
            (m.index, m.is_last, m.global_batch.stop) for m in whole[place + 1 :]
        ]


class Masking:
    """A collator with a generator of its own, from the start or made for the first batch."""

    def __init__(self, made_late: bool) -> None:
        self.generator = None if made_late else random.Random()

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        self.generator = self.generator or random.Random()
        return {"x": stack(samples)["x"][:, :2], "mask": [self.generator.random() for sample in samples]}


@pytest.mark.parametrize("made_late", [False, True])
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_generator_of_the_collators_own_is_resumed(kind: type[Plain], made_late: bool) -> None:
    layout, steps = Layout(3, 2), 8

    def collating(length: int) -> StreamLoader:
        return StreamLoader(kind(length), layout, LoaderConfig(Masking(made_late), SEED))

    whole = list(collating(19).micro_batches(0, 0, steps))
    masks = [micro.batch["mask"] for micro in whole]
    assert len({mask for batch in masks for mask in batch}) == 2 * 19  # each epoch has its own
    for taken in (1, 3, 4, 6):
        place = [place for place, micro in enumerate(whole) if micro.is_last][taken - 1]
        window = whole[place].global_batch
        start = (window.epoch + 1, 0) if window.closes_epoch else (window.epoch, window.stop)
        state = None if window.closes_epoch else window.data_state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of reading again
            rest = list(collating(19).micro_batches(*start, steps - taken, state))
        assert [micro.batch["mask"] for micro in rest] == masks[place + 1 :]
        assert rows(rest) == rows(whole[place + 1 :])


@pytest.mark.parametrize("shards", [(2, 11), (11, 2), (3, 12), (0, 8), (8, 0), (4, 4)])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_workers_with_shards_of_different_sizes_are_resumed(shards: tuple[int, int], taken: int) -> None:
    dataset, layout = Stateful(sum(shards), shards), Layout(3)
    whole = list(loader(dataset, layout, 2).micro_batches(0, 0, 5))
    first = sorted(samples([micro for micro in whole if micro.global_batch.epoch == 0]))
    assert first == list(range(len(first)))
    rest = resumed_at(Stateful(sum(shards), shards), layout, 2, 5 - taken, whole[taken - 1])
    assert rows(rest) == rows(whole[taken:])


def test_a_state_is_resumed_without_reading_what_was_before() -> None:
    for place in (10, 10_000):
        dataset = Stateful(20_000)
        micro_batches = loader(dataset, Layout(2)).micro_batches(0, place, 3, state_at(place))
        assert samples([next(micro_batches)]) == [place, place + 1]
        assert dataset.reads == 4  # one batch ahead


def test_the_state_goes_on_under_another_batch_size() -> None:
    whole = list(loader(Stateful(20), Layout(3)).micro_batches(0, 0, 3))
    rest = resumed_at(Stateful(20), Layout(4, 2), 0, 2, whole[-1])
    assert samples(rest) == list(range(9, 20))


@pytest.mark.parametrize(
    ("dataset", "workers", "is_warned"),
    [
        (Undivided(12), 2, True),
        (Undivided(12), 1, False),
        (Undivided(12), 0, False),
        (Plain(12), 2, False),
        (Plain(12, (4, 8)), 2, False),
    ],
)
def test_a_dataset_that_all_workers_read_whole_is_a_warning(dataset: Plain, workers: int, is_warned: bool) -> None:
    """Each sample comes as often as there are workers, without a word of torch."""

    def samples() -> int:
        batches = StreamEvaluation(dataset, Layout(2), LoaderConfig(stack, SEED, workers))
        return sum(len(batch["x"]) for batch, _, _ in batches)

    if not is_warned:
        assert samples() == 12
        return
    with pytest.raises(UserWarning, match="the dataset does not ask in which of 2 workers it is read"):
        samples()  # a worker's warning is an error in tests
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert samples() == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_state_it_is_passed_over_with_a_warning(workers: int) -> None:
    one = loader(Plain(20), Layout(4), workers)
    whole = list(one.micro_batches(1, 0, 5))
    taken, said = (2, "8 samples") if workers == 0 else (3, "12 samples")
    end = whole[taken - 1].global_batch
    with pytest.warns(UserWarning, match=f"no state_dict: {said} of epoch 1 are read again and skipped") as caught:
        rest = list(one.micro_batches(1, end.stop, 5 - taken, end.data_state))
    assert len([each for each in caught if each.category is UserWarning]) == 1  # Python 3.12 warns of forks too
    assert rows(rest) == rows(whole[taken:])
    assert rest[0].start == end.stop


def test_reading_again_leaves_no_bar_in_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    first = list(loader(Plain(20), Layout(4)).micro_batches(0, 0, 2))[-1].global_batch
    with pytest.warns(UserWarning, match="no state_dict"):
        list(loader(Plain(20), Layout(4)).micro_batches(0, 8, 3, first.data_state))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_with_another_batch_size_the_rest_of_the_samples_comes(kind: type[Plain], workers: int) -> None:
    whole = list(loader(kind(64), Layout(4), workers).micro_batches(0, 0, 16))
    for taken in (1, 3, 15):
        rest = resumed_at(kind(64), Layout(5), workers, 30, whole[taken - 1])
        here = [micro for micro in rest if micro.global_batch.epoch == 0]
        assert here[0].start == 4 * taken
        assert sorted(samples(here)) == sorted(samples(whole[taken:]))
        if workers == 0:
            assert samples(here) == samples(whole[taken:])


def test_a_place_in_an_epoch_without_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing says where train_dataset stood after 8 samples of epoch 1"):
        next(loader(Plain(20), Layout(4)).micro_batches(1, 8, 3))


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_each_sample_once_an_epoch_in_counted_steps(
    length: int, batch_size: int, accumulation: int, drop_last: bool
) -> None:
    one = loader(Plain(length), Layout(batch_size, accumulation), drop_last=drop_last)
    used = length - length % batch_size if drop_last else length
    if used == 0:
        with pytest.raises(ValueError, match="train_dataset gave no full batch"):
            list(one.micro_batches(0, 0, 1))
        return
    steps = -(-used // (batch_size * accumulation))
    micro_batches = list(one.micro_batches(0, 0, 2 * steps))
    assert samples(micro_batches) == list(range(used)) * 2
    windows = [micro.global_batch for micro in micro_batches if micro.is_last]
    assert [window.closes_epoch for window in windows] == ([False] * (steps - 1) + [True]) * 2
    assert sum(window.samples for window in windows) == 2 * used
    assert windows[-1].stop == used
    for micro in micro_batches:
        assert micro.batch["x"][:, 2].eq(micro.global_batch.epoch).all()  # told by set_epoch


def test_with_workers_each_sample_comes_once_where_the_dataset_divides_itself() -> None:
    micro_batches = list(loader(Plain(23), Layout(4), 2).micro_batches(0, 0, 6))
    assert sorted(samples(micro_batches)) == list(range(23))
    assert [micro.global_batch.closes_epoch for micro in micro_batches] == [False] * 5 + [True]
    noise = [row[1] for batch in rows(micro_batches) for row in batch]
    assert len(set(noise)) == 23


class Sized(Plain):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("length", "layout"), [(10, Layout(4)), (19, Layout(3, 2)), (24, Layout(4, 3)), (7, Layout(2))]
)
def test_a_length_tells_the_steps_of_an_epoch(length: int, layout: Layout, drop_last: bool, workers: int) -> None:
    one = loader(Sized(length), layout, workers, drop_last=drop_last)
    micro_batches = one.micro_batches(0, 0, 100)
    taken = 0
    for micro in micro_batches:
        taken += micro.is_last
        if micro.global_batch.closes_epoch and micro.is_last:
            break
    assert one.steps_left(0, 0) == taken


@settings(max_examples=200)
@given(
    st.integers(1, 60), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.booleans()
)  # fmt: skip
def test_the_steps_left_are_known_at_every_step(
    length: int, size: int, accumulation: int, processes: int, workers: int, drop_last: bool
) -> None:
    layout = Layout(size, accumulation, processes)
    readers = max(1, workers)
    shares = [len(range(reader, length, readers)) for reader in range(readers)]
    turns = [min(size, share - start) for start in range(0, length, size) for share in shares]
    batches = [each for each in turns if each == size or (each > 0 and not drop_last)]
    if drop_last:
        batches = batches[: len(batches) - len(batches) % processes]
    if not batches:
        with pytest.raises(ValueError, match="dataloader_drop_last=True leaves nothing"):
            loader(Sized(length), layout, workers, drop_last=drop_last)
        return
    one = loader(Sized(length), layout, workers, drop_last=drop_last)
    assert one.epoch_length == sum(batches)
    taken_at_once = processes * accumulation
    steps = [sum(batches[start : start + taken_at_once]) for start in range(0, len(batches), taken_at_once)]
    for taken in range(len(steps) + 1):
        assert one.steps_left(0, sum(steps[:taken])) == len(steps) - taken


@pytest.mark.parametrize(("workers", "said"), [(0, "resume is not exact$"), (2, "each of the 2 workers must give its")])
def test_a_length_that_is_too_small_is_told_of_once(workers: int, said: str) -> None:
    class Undivided(Sized):
        def mine(self) -> range:
            return range(self.length if workers else 2 * self.length)

    with pytest.warns(UserWarning, match=f"has a length of 6, but gave more samples: .*{said}") as caught:
        list(loader(Undivided(6), Layout(2), workers).micro_batches(0, 0, 12))
    assert len([each for each in caught if each.category is UserWarning]) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_length_that_is_too_great_is_told_of_once(workers: int) -> None:
    class Less(Sized):
        def mine(self) -> range:
            info = torch.utils.data.get_worker_info()
            return range(4) if info is None else [range(1), range(1, 4)][info.id]

    with pytest.warns(UserWarning, match="has a length of 6, but gave fewer samples: epochs and steps") as caught:
        list(loader(Less(6), Layout(2), workers).micro_batches(0, 0, 9))
    assert len([each for each in caught if each.category is UserWarning]) == 1


def test_a_length_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="train_dataset is empty"):
        loader(Sized(0), Layout(2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_an_empty_dataset_is_an_error_and_no_endless_loop(kind: type[Plain], workers: int) -> None:
    with pytest.raises(ValueError, match="train_dataset gave no sample in epoch 0"):
        list(loader(kind(0), Layout(2), workers).micro_batches(0, 0, 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_without_a_full_batch_is_an_error(workers: int) -> None:
    with pytest.raises(ValueError, match="no full batch for each process in epoch 0, and dataloader_drop_last=True"):
        list(loader(Plain(3), Layout(4), workers, drop_last=True).micro_batches(0, 0, 3))


def test_a_generator_is_used_up_after_one_epoch() -> None:
    once = ({"x": torch.tensor([float(index), 0.0, 0.0])} for index in range(4))
    micro_batches = loader(once, Layout(2)).micro_batches(0, 0, 5)
    assert samples([next(micro_batches), next(micro_batches)]) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"is an iterator, which ended in epoch 0, .* ReadyBatches"):
        next(micro_batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_is_named_with_the_batch(workers: int) -> None:
    class Broken(Plain):
        def sample(self, index: int) -> dict[str, Any]:
            if index == 9:
                raise OSError("the disk is gone")
            return super().sample(index)

    with pytest.raises(DataError, match=r"raised after sample \d of worker \d \(epoch 2\): OSError: the disk is gone"):
        list(loader(Broken(20), Layout(2), workers).micro_batches(2, 0, 9))


def test_another_number_of_workers_is_refused() -> None:
    first = next(loader(Stateful(20), Layout(2), 2).micro_batches(0, 0, 9))
    with pytest.raises(ValueError, match="states of 2 workers of an iterable dataset, but dataloader_num_workers=0"):
        list(loader(Stateful(20), Layout(2)).micro_batches(0, 2, 5, first.global_batch.data_state))


def test_a_state_that_cannot_be_loaded_is_no_state() -> None:
    class HalfStateful(Plain):
        def state_dict(self) -> dict[str, Any]:
            return {}

    state = next(loader(HalfStateful(40), Layout(20)).micro_batches(0, 0, 2)).global_batch.data_state
    assert state is not None
    assert state["workers"][0]["mark"]["dataset"] is None


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_state_that_needs_arguments_is_no_state(is_ready: bool) -> None:
    """That of litdata's StreamingDataset asks for the position."""

    class Positioned(Stateful):
        def state_dict(self, num_samples: int) -> dict[str, Any]:  # type: ignore[override]
            raise AssertionError

        def __iter__(self) -> Iterator[Any]:
            self.place = 0
            return (stack([sample]) if is_ready else sample for sample in super().__iter__())

    def positioned() -> Any:
        return ReadyBatches(Positioned(12)) if is_ready else Positioned(12)

    size = 1 if is_ready else 4
    whole = list(loader(positioned(), Layout(size)).micro_batches(0, 0, 20))
    window = whole[1].global_batch
    with pytest.warns(UserWarning, match="no state_dict"):
        rest = list(loader(positioned(), Layout(size)).micro_batches(0, window.stop, 18, window.data_state))
    assert rows(rest) == rows(whole[2:])


def test_a_state_is_a_copy() -> None:
    class Listed(Stateful):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.seen: list[int] = []

        def sample(self, index: int) -> dict[str, Any]:
            self.seen.append(index)
            return super().sample(index)

        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place, "seen": self.seen}

    windows = [micro.global_batch for micro in loader(Listed(160), Layout(32)).micro_batches(0, 0, 5)]
    marks = [window.data_state["workers"][0]["mark"] for window in windows if window.data_state]
    assert [mark["dataset"] and len(mark["dataset"]["seen"]) for mark in marks] == [None, 32, 64, 96, 128]


def windows_of(ranks: list[list[MicroBatch]]) -> list[list[list[MicroBatch]]]:
    """The micro-batches by step, row and rank."""
    steps: list[list[list[MicroBatch]]] = []
    for row in zip(*ranks, strict=True):
        if row[0].index == 0:
            steps.append([])
        steps[-1].append(list(row))
    return steps


def check_dealt(ranks: list[list[MicroBatch]], alone: list[MicroBatch]) -> None:
    """That processes together do in the same steps what one does alone whose accumulation is as much larger."""
    expected = iter(alone)
    for rows_of_step in windows_of(ranks):
        dealt = [micro for row in rows_of_step for micro in row]
        counted = [micro for micro in dealt if micro.counts.samples]
        assert counted == dealt[: len(counted)]  # stand-ins come last
        for micro in counted:
            one = next(expected)
            assert micro.batch["x"].tolist() == one.batch["x"].tolist()
            assert (micro.counts, micro.start) == (one.counts, one.start)
        assert one.is_last
        for micro in dealt[len(counted) :]:
            assert micro.counts == (0, 0, 0, 0)
            assert len(micro.batch["x"]) > 0
        for micro in dealt:
            window = micro.global_batch
            assert (window.epoch, window.stop, window.closes_epoch, window.data_state) == (
                one.global_batch.epoch,
                one.global_batch.stop,
                one.global_batch.closes_epoch,
                one.global_batch.data_state,
            )
        for rank in range(len(ranks)):
            own = [row[rank] for row in rows_of_step]
            assert [micro.index for micro in own] == list(range(len(own)))
            assert [micro.is_last for micro in own] == [False] * (len(own) - 1) + [True]
            assert (
                own[0].global_batch.samples == own[0].global_batch.labels == sum(micro.counts.samples for micro in own)
            )
    assert next(expected, None) is None


@pytest.mark.slow
@settings(max_examples=100)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([Plain, Stateful]))
def test_processes_take_the_batches_of_one_in_turn(
    length: int, size: int, accumulation: int, processes: int, kind: type[Plain]
) -> None:
    steps = 2 * -(-length // (size * accumulation * processes))
    ranks = [
        list(loader(kind(length), Layout(size, accumulation, processes, rank)).micro_batches(0, 0, steps))
        for rank in range(processes)
    ]
    check_dealt(ranks, list(loader(kind(length), Layout(size, accumulation * processes)).micro_batches(0, 0, steps)))


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.integers(1, 40), st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3)), st.integers(1, 7),
    st.sampled_from([Plain, Stateful]), st.booleans(),
)  # fmt: skip
def test_a_limit_only_cuts_what_a_process_has(
    length: int, shape: tuple[int, int, int], limit: int, kind: type[Plain], drop_last: bool
) -> None:
    """Samples, steps, positions and states are those without it; all processes have as many parts."""
    layout = Layout(*shape)
    assume(not drop_last or length >= layout.global_micro_batch_size)
    numbers = []
    for rank in range(layout.readers):
        own = layout._replace(reader=rank)
        whole = [*loader(kind(length), own, drop_last=drop_last).micro_batches(0, 0, 5)]
        cut = [*loader(kind(length), own._replace(limit=limit), drop_last=drop_last).micro_batches(0, 0, 5)]
        counted = [[micro for micro in each if micro.counts.samples] for each in (whole, cut)]
        assert samples(counted[0]) == samples(counted[1])
        ends = [
            [(micro.global_batch.stop, micro.global_batch.data_state) for micro in each if micro.is_last]
            for each in (whole, cut)
        ]
        assert ends[0] == ends[1]
        places = {int(row[0]): micro.start for micro in counted[1] for row in micro.batch["x"].tolist()[:1]}
        assert all(place == sample for sample, place in places.items())
        assert all(1 <= len(micro.batch["x"]) <= limit for micro in cut)
        numbers.append([(micro.index, micro.is_last) for micro in cut])
    assert all(each == numbers[0] for each in numbers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_processes_with_workers_take_the_batches_of_one_in_turn(kind: type[Plain]) -> None:
    ranks = [list(loader(kind(23), Layout(2, 2, 3, rank), 2).micro_batches(0, 0, 4)) for rank in range(3)]
    check_dealt(ranks, list(loader(kind(23), Layout(2, 6), 2).micro_batches(0, 0, 4)))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_another_number_of_processes_goes_on_exactly(kind: type[Plain], before: int, after: int, taken: int) -> None:
    first = list(loader(kind(41), Layout(3, 1, before, before - 1)).micro_batches(0, 0, taken))
    ranks = [resumed_at(kind(41), Layout(3, 2, after, rank), 0, 6, first[-1]) for rank in range(after)]
    check_dealt(ranks, resumed_at(kind(41), Layout(3, 2 * after), 0, 6, first[-1]))
    seen = [
        row for step in windows_of(ranks) for row in step if row[0].global_batch.epoch == first[-1].global_batch.epoch
    ]
    rest = [sample for row in seen for micro in row if micro.counts.samples for sample in samples([micro])]
    assert rest == list(range(3 * before * taken, 41))


@settings(max_examples=100)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(2, 3))
def test_without_the_last_only_whole_rows_are_trained_on(
    length: int, size: int, accumulation: int, processes: int
) -> None:
    used = length - length % (size * processes)
    layout = Layout(size, accumulation, processes)
    loaders = [loader(Plain(length), layout._replace(reader=rank), drop_last=True) for rank in range(processes)]
    if used == 0:
        with pytest.raises(ValueError, match="train_dataset gave no full batch"):
            list(loaders[0].micro_batches(0, 0, 1))
        return
    steps = -(-used // layout.global_batch_size)
    ranks = [list(each.micro_batches(0, 0, 2 * steps)) for each in loaders]
    assert all(micro.counts.samples == size for rank in ranks for micro in rank)
    dealt = [micro for step in windows_of(ranks) for row in step for micro in row]
    assert samples(dealt) == list(range(used)) * 2
    assert [micro.global_batch.closes_epoch for micro in ranks[0] if micro.is_last] == (
        [False] * (steps - 1) + [True]
    ) * 2


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("position", range(1, 20))
@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(3, 2, 3), Layout(4)])
def test_the_steps_left_are_known_from_any_position(layout: Layout, position: int, drop_last: bool) -> None:
    """As after a resume with another layout."""

    class SizedStateful(Stateful, Sized):
        pass

    one = loader(SizedStateful(20), layout, drop_last=drop_last)
    windows = [micro.global_batch for micro in one.micro_batches(3, position, 20, state_at(position)) if micro.is_last]
    assert one.steps_left(3, position) == sum(window.epoch == 3 for window in windows)


def test_batches_of_other_processes_are_let_go() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = stack(rows)
        made.append(weakref.ref(batch["x"]))
        return batch

    one = StreamLoader(Plain(40), Layout(1, 2, 4, 1), LoaderConfig(collate, SEED))
    micro_batches = one.micro_batches(0, 0, 4)
    assert next(micro_batches).batch["x"] is made[1]()
    assert len(made) == 12  # one row ahead
    assert [number for number, batch in enumerate(made[:-1]) if batch() is not None] == [1, 5, 9]


def test_a_stand_in_is_counted_as_other_batches_are() -> None:
    """Labels that lie on a device are counted there."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {
            "x": torch.stack([row["x"] for row in rows]),
            "labels": torch.zeros(len(rows), dtype=torch.int64, device="meta"),
        }

    (micro,) = StreamLoader(Plain(2), Layout(2, 1, 2, 1), LoaderConfig(collate, SEED)).micro_batches(0, 0, 1)
    assert micro.counts.samples == micro.global_batch.samples == 0
    assert micro.counts.labels.device == micro.global_batch.shifted.device == torch.device("meta")


def test_workers_leave_this_process_its_generators() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1).item()
    torch.manual_seed(3)
    list(loader(Plain(12), Layout(2), 2).micro_batches(0, 0, 6))
    assert torch.rand(1).item() == expected


many_layouts = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=3).map(
    lambda found: [(0, start, start + size) for start, size in found]
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.integers(1, 40),
    st.lists(many_layouts, min_size=1, max_size=3),
    ranges,
    st.sampled_from([Sized, Stateful]),
    st.data(),
)
def test_what_is_not_passed_over_comes_exactly_once_however_the_layout_changes(
    length: int, chain: list[tuple[int, int, int]], passed_over: Any, kind: type[Plain], data: st.DataObject
) -> None:
    class Known(kind):  # type: ignore[valid-type, misc]
        def __len__(self) -> int:
            return int(self.length)

    expected = [place for place in range(length) if not any(start <= place < stop for _, start, stop in passed_over)]
    position, state, found = 0, None, list[int]()
    for number, (size, accumulation, processes) in enumerate(chain):
        loaders = [loader(Known(length), Layout(size, accumulation, processes, rank)) for rank in range(processes)]
        for each in loaders:
            each.passed_over = passed_over
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of passing over
            left = loaders[0].steps_left(0, position)
            ranks = [list(each.micro_batches(0, position, left + 2, state)) for each in loaders]  # into the next epoch
        steps = windows_of([[micro for micro in rank if micro.global_batch.epoch == 0] for rank in ranks])
        assert len(steps) == left
        assert [step[0][0].global_batch.closes_epoch for step in steps] == [False] * (len(steps) - 1) + [True] * bool(
            steps
        )
        taken = data.draw(st.integers(0, len(steps))) if number < len(chain) - 1 else len(steps)
        for step in steps[:taken]:
            counted = [micro for row in step for micro in row if micro.counts.samples]
            window = step[0][0].global_batch
            assert position <= window.start == counted[0].start
            assert samples(counted) == list(range(window.start, window.stop))
            assert [micro.start for micro in counted] == [samples([micro])[0] for micro in counted]
            found += samples(counted)
            position, state = window.stop, window.data_state
    assert found == expected


@pytest.mark.parametrize("kind", [Sized, Stateful])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_one_step_read_is_passed_over_with_workers_too(kind: type[Plain], drop_last: bool) -> None:
    class Known(kind):  # type: ignore[valid-type, misc]
        def __len__(self) -> int:
            return int(self.length)

    layout = Layout(3, 2, 2)
    whole = list(loader(Known(45), layout, 2, drop_last=drop_last).micro_batches(0, 0, 4))
    bad = whole[2].global_batch  # the second step
    one = loader(Known(45), layout, 2, drop_last=drop_last)
    one.passed_over = [(0, bad.start, bad.stop)]
    assert one.steps_left(0, 0) == sum(micro.is_last and micro.global_batch.epoch == 0 for micro in whole) - 1
    after = [micro for micro in whole if micro.global_batch.epoch == 0 and micro.global_batch is not bad]
    rest = list(one.micro_batches(0, 0, one.steps_left(0, 0)))
    assert rows(rest) == rows(after)
    assert [micro.start for micro in rest] == [micro.start for micro in after]


def test_only_the_end_of_an_epoch_is_left_out_where_something_is_passed_over() -> None:
    ranks = [loader(Sized(40), Layout(3, 1, 2, rank), drop_last=True) for rank in range(2)]
    for one in ranks:
        one.passed_over = [(0, 8, 20)]
    assert ranks[0].steps_left(0, 0) == 5
    steps = windows_of([list(one.micro_batches(0, 0, 5)) for one in ranks])
    counted = [micro for step in steps for row in step for micro in row if micro.counts.samples]
    assert samples(counted) == [*range(8), *range(20, 38)]


def test_an_epoch_that_is_passed_over_whole_is_no_empty_dataset() -> None:
    one = loader(Plain(6), Layout(2))
    one.passed_over = [(0, 0, 6)]
    assert [micro.global_batch.epoch for micro in one.micro_batches(0, 0, 2)] == [1, 1]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_after_another_batch_size_a_resume_gives_the_same_batches(kind: type[Plain]) -> None:
    first = list(loader(kind(40), Layout(3)).micro_batches(0, 0, 3))
    second = resumed_at(kind(40), Layout(5, 1, 2), 0, 4, first[-1])
    third = resumed_at(kind(40), Layout(5, 1, 2), 0, 3, second[0])
    assert rows(third) == rows(second[1:])


# Another number of processes that keeps the steps


def kept_steps(
    make: Any, layout: Layout, full: Layout, workers: int = 0, **options: Any
) -> list[tuple[list[list[MicroBatch]], list[list[MicroBatch]]]]:
    """The micro-batches by step and rank: as dealt in a layout, and in the full one whose steps it keeps."""
    steps, found = 4, []
    for each in (layout, full):
        ranks = [
            list(loader(make(), each._replace(reader=rank), workers, **options).micro_batches(0, 0, steps))
            for rank in range(each.readers)
        ]
        assert len({tuple((micro.index, micro.is_last) for micro in rank) for rank in ranks}) == 1
        by_step: dict[int, list[list[MicroBatch]]] = {}
        for rank, own in enumerate(ranks):
            step = 0
            for micro in own:
                by_step.setdefault(step, [[] for _ in ranks])[rank].append(micro)
                step += micro.is_last
        found.append([by_step[step] for step in sorted(by_step)])
    assert len(found[0]) == len(found[1])
    return [*zip(*found, strict=True)]


def windows(step: list[list[MicroBatch]]) -> list[tuple[Any, ...]]:
    found = [micro.global_batch for own in step for micro in own]
    return [(each.epoch, each.start, each.stop, each.closes_epoch, each.data_state) for each in found]


def counted_samples(own: list[MicroBatch]) -> list[int]:
    return samples([micro for micro in own if micro.counts.samples])


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.integers(1, 60), layouts(5, 3, 5, full=st.integers(1, 5)).filter(lambda layout: layout.full is not None),
    st.sampled_from([Plain, Stateful]), st.booleans(),
)  # fmt: skip
def test_a_kept_step_has_the_samples_and_the_state_of_the_full_one(
    length: int, layout: Layout, kind: type[Plain], drop_last: bool
) -> None:
    assert layout.full is not None
    assume(not drop_last or length >= layout.global_micro_batch_size)
    for few, whole in kept_steps(lambda: kind(length), layout, layout.full, drop_last=drop_last):
        assert {*map(repr, windows(few))} == {*map(repr, windows(whole))}
        taken = [counted_samples(own) for own in few]
        assert sorted(itertools.chain(*taken)) == sorted(itertools.chain(*map(counted_samples, whole)))
        if sum(map(len, taken)) == layout.global_batch_size:
            assert [len(own) for own in taken] == layout.shares
            sizes = [micro.counts.samples for own in few for micro in own]
            assert max(sizes) - min(sizes) <= 1
        for micro in (micro for own in few for micro in own):
            assert 1 <= len(micro.batch["x"]) <= layout.at_once
            if micro.counts.samples:
                assert micro.start == int(micro.batch["x"][0, 0])  # each sample is at its place
        noises = [
            {tuple(row) for own in step for micro in own for row in micro.batch["x"].tolist()} for step in (few, whole)
        ]
        assert noises[0] == noises[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_kept_step_has_the_samples_of_the_full_one_with_workers(kind: type[Plain]) -> None:
    layout = kept(3, 1, 2, full=3)
    assert layout.full is not None
    for few, whole in kept_steps(lambda: kind(41), layout, layout.full, workers=2):
        assert {*map(repr, windows(few))} == {*map(repr, windows(whole))}
        assert sorted(itertools.chain(*map(counted_samples, few))) == sorted(
            itertools.chain(*map(counted_samples, whole))
        )
        if sum(len(counted_samples(own)) for own in few) == 9:
            assert [len(counted_samples(own)) for own in few] == [5, 4]


def test_ready_batches_stay_whole_in_a_kept_step() -> None:
    batches = [{"x": torch.full((size, 1), float(number))} for number, size in enumerate([3, 1, 2, 4, 2, 2, 3])]
    full = Layout(1, 1, 4, ready_size=1, has_own_batches=True)
    layout = full._replace(readers=3).keep_steps_of(4, 1)
    taken = []
    for few, whole in kept_steps(lambda: ReadyBatches(batches), layout, full):
        assert {*map(repr, windows(few))} == {*map(repr, windows(whole))}
        taken.append([counted_samples(own) for own in few])
    assert taken[:2] == [[[0, 0, 0, 3, 3, 3, 3], [1], [2, 2]], [[4, 4], [5, 5], [6, 6, 6]]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_steps_left_of_a_kept_layout_are_those_of_the_full_one(drop_last: bool) -> None:
    full = Layout(3, 2, 4)
    layout = full._replace(readers=3).keep_steps_of(4, 1)
    for position in (0, 24, 48):
        left = [loader(Sized(67), each, drop_last=drop_last).steps_left(0, position) for each in (full, layout)]
        assert left[0] == left[1]


def test_a_collator_draws_the_same_for_a_kept_step_whatever_came_before() -> None:
    """Randomness follows from the place of the samples, and the generators of the process stay as they are."""

    def collate(rows: list[Any]) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), "noise": torch.rand(len(rows))}

    layout = Layout(3, 1, 2).keep_steps_of(3, 1)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        one = StreamLoader(Stateful(30), layout, LoaderConfig(collate, SEED))
        found.append([micro.batch["noise"].tolist() for micro in one.micro_batches(0, 0, 3)])
    assert found[0] == found[1]
    assert len({*map(tuple, found[0])}) == len(found[0])


@given(st.integers(12, 60), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(1, 60))
@settings(max_examples=40)
def test_a_length_that_is_right_is_not_told_of(
    length: int, size: int, accumulation: int, drop_last: bool, steps: int
) -> None:
    one = loader(Sized(length), Layout(size, accumulation), drop_last=drop_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(one.micro_batches(0, 0, steps))

"""What a user's dataset, loader or sampler stands for."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.data_training import Classifier, Rows, check_resume, rows, train, weights
from kit.ranks import RankFailed, on_ranks
from kit.trainer import arguments
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from trainer_kit import ReadyBatches, Stateful, Trainer
from trainer_kit.data.source import DataSource, begin_epoch, data_length, data_source, is_named


def ready(size: int = 5) -> list[Any]:
    samples = rows()
    return [default_collate(samples[start : start + size]) for start in range(0, 22, size)]


class Resumable:
    """Batches with a state; `reads` counts those that were made."""

    def __init__(self) -> None:
        self.position = self.reads = 0

    def __iter__(self) -> Any:
        batches = ready(2)
        while self.position < len(batches):
            self.position += 1
            self.reads += 1
            yield batches[self.position - 1]
        self.position = 0

    def __len__(self) -> int:
        return 11

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def source(data: Any, sampler: Any = None) -> DataSource:
    return data_source("train_dataset", data, sampler)


def test_a_loader_of_a_dataset_is_taken_apart() -> None:
    data = rows()
    shuffled = source(DataLoader(data, batch_size=5, shuffle=True, drop_last=True, num_workers=2))
    assert (shuffled.dataset, shuffled.sampler, shuffled.shuffle, shuffled.batch_size) == (data, None, True, 5)
    assert (shuffled.drop_last, shuffled.workers, shuffled.collate) == (True, 2, default_collate)
    assert source(DataLoader(data)).shuffle is False
    ahead = source(DataLoader(data, num_workers=1, prefetch_factor=7, multiprocessing_context="spawn"))
    assert (ahead.prefetch_factor, ahead.multiprocessing_context.get_start_method()) == (7, "spawn")
    seeded = source(DataLoader(data, shuffle=True, generator=torch.Generator()))
    assert isinstance(seeded.sampler, RandomSampler)
    batches = BatchSampler(SequentialSampler(data), 3, drop_last=False)
    assert source(DataLoader(data, batch_sampler=batches)).sampler is batches


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (RandomSampler(range(10)), 10),
        (SequentialSampler(range(4)), 4),
        (RandomSampler(range(22), num_samples=5), 5),
        (RandomSampler(range(10), replacement=True, num_samples=22), 22),
        (RandomSampler(range(10), num_samples=22), 22),
    ],
)
def test_a_sampler_of_other_samples_is_taken_as_it_is(sampler: Any, expected: int, tmp_path: Path) -> None:
    assert source(rows(), sampler).sampler is sampler
    assert source(DataLoader(rows(), sampler=sampler)).sampler is sampler
    _, steps = train(tmp_path, DataLoader(rows(), batch_size=5, sampler=sampler), num_train_epochs=1)
    trained = [index for step in steps.samples for index in step]
    assert len(trained) == expected
    assert max(trained) < len(sampler.data_source)


def test_the_dataset_of_a_loader_may_have_no_truth_value() -> None:
    assert source(DataLoader(torch.arange(22), shuffle=True)).shuffle is True
    assert source(DataLoader(torch.arange(22))).shuffle is False


class Counted(IterableDataset[int]):
    """Gives each worker its share of the numbers."""

    def __len__(self) -> int:
        return 18

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(18) if worker is None else range(worker.id, 18, worker.num_workers))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_loader_of_a_sized_stream_has_as_many_batches_as_its_workers_give(workers: int, drop_last: bool) -> None:
    loader = DataLoader(Counted(), batch_size=4, num_workers=workers, drop_last=drop_last)
    assert source(loader).length == len(list(loader))


def test_what_yields_batches_is_ready() -> None:
    stream = source(DataLoader(Rows(), batch_size=5))
    assert stream.is_ready
    assert stream.length is None

    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    assert source(Own(rows(), batch_size=5)).is_ready
    assert source(Own(rows(), batch_size=5)).length == 5
    assert source(DataLoader(rows(), batch_size=None)).is_ready
    assert not source(ReadyBatches(DataLoader(rows()))).is_ready
    assert source(ReadyBatches(iter(ready()))).is_read_once
    assert isinstance(ReadyBatches(Resumable()), Stateful)
    assert not isinstance(ReadyBatches(ready()), Stateful)
    with pytest.raises(TypeError, match="ReadyBatches needs an iterable of batches; this is a int"):
        ReadyBatches(3)  # type: ignore[arg-type]


def test_ready_batches_are_pickled_and_copied() -> None:
    for batches in (ready(), Resumable()):
        for again in (pickle.loads(pickle.dumps(ReadyBatches(batches))), copy.deepcopy(ReadyBatches(batches))):
            assert isinstance(again, Stateful) == isinstance(batches, Stateful)
            assert [len(batch["x"]) for batch in again] == [len(batch["x"]) for batch in batches]


class ByName(Mapping[Any, Any]):
    """A mapping that is no dict."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self.content = content

    def __getitem__(self, key: Any) -> Any:
        return self.content[key]

    def __iter__(self) -> Any:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Indexed(ByName, Dataset[Any]):
    """A dataset that is a mapping too."""


def test_a_mapping_that_is_a_dataset_is_no_dict_of_datasets(tmp_path: Path) -> None:
    by_index = dict(enumerate(rows()))
    assert is_named({"a": rows()})
    assert is_named({0: rows()})
    assert is_named(ByName({"a": rows()}))
    trainer = Trainer(Classifier(), arguments(tmp_path), rows(), eval_dataset=rows())
    expected = trainer.evaluate()["eval_loss"]
    for data in (ByName(by_index), Indexed(by_index)):
        assert not is_named(data)
        assert data_length(data) == 22
        assert trainer.evaluate(data)["eval_loss"] == expected
    assert trainer.evaluate(ByName({"a": rows()}))["eval_a_loss"] == expected
    with pytest.raises(TypeError, match="train_dataset is a ByName of a; give one dataset"):
        source(ByName({"a": rows()}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (("pandas.core.frame", "DataFrame"), r'is a DataFrame of pandas.* give df.to_dict\("records"\) or datasets'),
        (("pandas", "DataFrame"), "is a DataFrame of pandas, which is indexed by column, not by sample; give df"),
        (("pyarrow.lib", "Table"), r"is a Table of pyarrow.* give table.to_pylist\(\) or datasets"),
    ],
)
def test_a_table_that_is_indexed_by_column_is_refused(kind: tuple[str, str], message: str) -> None:
    table = type(kind[1], (list,), {"__module__": kind[0]})
    with pytest.raises(TypeError, match=message):
        source(table())
    assert source(type(kind[1], (list,), {})(rows())).length == 22


class Module:
    def train_dataloader(self) -> Any: ...

    def val_dataloader(self) -> Any: ...


class CombinedLoader:
    """As Lightning's."""


class PyDataset:
    """As that of keras."""

    __module__ = "keras.src"

    def __getitem__(self, index: int) -> Any: ...


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [DataLoader(rows()), DataLoader(rows())],
            "is a list of DataLoaders; give one loader, or a dict of loaders",
        ),
        (Module(), r"is a Module, which makes loaders; give what its train_dataloader or val_dataloader returns after"),
        (PyDataset(), "is a PyDataset of keras, which has batches in place of samples; give ReadyBatches"),
        (CombinedLoader(), "is a CombinedLoader, which is read in modes of Lightning's; give one loader"),
    ],
)
def test_what_other_libraries_take_is_refused_before_training(tmp_path: Path, data: Any, message: str) -> None:
    args = arguments(tmp_path)
    for eval_dataset in (data, {"a": rows(), "b": data}):
        with pytest.raises(TypeError, match=f"^eval_dataset {message}"):
            Trainer(Classifier(), args, rows(), eval_dataset)
    with pytest.raises(TypeError, match=f"^train_dataset {message}"):
        Trainer(Classifier(), args, data).train()


def test_what_can_be_read_in_any_order() -> None:
    assert not source([1, 2]).is_iterable
    for data in (Rows(), iter([1, 2]), {1, 2}):
        assert source(data).is_iterable
    assert data_length(None) is None
    assert data_length(rows()) == 22
    assert data_length(iter(rows())) is None


def test_data_with_an_order_of_its_own_takes_no_sampler() -> None:
    for data in (Rows(), DataLoader(rows())):
        with pytest.raises(ValueError, match=r"train_sampler needs a train_dataset with a length .* order of its own"):
            source(data, SequentialSampler(rows()))


def test_a_distributed_sampler_stands_for_the_samples_of_all_replicas() -> None:
    mine = DistributedSampler(rows(), num_replicas=4, rank=3, seed=5)
    whole: Any = source(rows(), mine).sampler
    whole.set_epoch(2)
    mine.set_epoch(2)
    assert sorted(whole) == [*range(22)]
    assert [*mine] == [*whole, *[*whole][:2]][3::4]


def test_a_batch_sampler_of_a_distributed_one_gives_the_batches_of_all_replicas() -> None:
    mine = BatchSampler(DistributedSampler(rows(), num_replicas=2, rank=1, seed=5), 4, drop_last=True)
    whole: Any = source(DataLoader(rows(), batch_sampler=mine)).sampler
    assert type(whole) is BatchSampler
    assert [len(batch) for batch in whole] == [4] * 5
    assert {*itertools.chain(*whole)} <= {*range(22)}
    assert whole.sampler.seed == 5


def test_another_sampler_that_divides_the_data_is_refused() -> None:
    class Own(DistributedSampler[Any]):
        pass

    own = Own(rows(), 4, 1)
    batches = BatchSampler(own, 2, drop_last=False)
    for loader in (DataLoader(rows(), sampler=own), DataLoader(rows(), batch_sampler=batches)):
        with pytest.raises(ValueError, match=r"the Own gives each of 4 processes a share .* num_replicas=1 and rank=0"):
            source(loader)
    with pytest.raises(ValueError, match="the Own gives each of 4 processes a share"):
        source(rows(), batches)
    alone = Own(rows(), 1, 0)
    assert source(rows(), alone).sampler is alone


def test_an_epoch_s_generator_does_not_depend_on_earlier_epochs() -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 20, generator=generator)
    expected = [*WeightedRandomSampler([1.0, 2.0, 3.0], 20, generator=torch.Generator().manual_seed(3))]
    orders = []
    for epoch in (0, 1, 1, 0):
        begin_epoch(sampler, epoch)
        orders.append([*sampler])
    assert orders[0] == orders[3] == expected
    assert orders[1] == orders[2] != expected


def test_a_generator_follows_the_seed_that_the_user_gave_it_last() -> None:
    def orders(sampler: Any) -> list[list[int]]:
        found = []
        for epoch in (0, 1):
            begin_epoch(sampler, epoch)
            found.append([*sampler])
        return found

    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(range(20), generator=generator)
    first = orders(sampler)
    generator.manual_seed(4)
    second = orders(sampler)
    assert second == orders(RandomSampler(range(20), generator=torch.Generator().manual_seed(4)))
    assert second != first
    generator.manual_seed(3)
    assert orders(sampler) == first


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(rows(), batch_size=5, shuffle=True),
    "workers": lambda: DataLoader(rows(), batch_size=5, shuffle=True, num_workers=2),
    "seeded": lambda: DataLoader(rows(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "distributed": lambda: DataLoader(rows(), batch_size=5, sampler=DistributedSampler(rows(), 2, 1)),
    "batches of a distributed one": lambda: DataLoader(
        rows(), batch_sampler=BatchSampler(DistributedSampler(rows(), 2, 1), 5, drop_last=False)
    ),
    "stateful": lambda: ReadyBatches(Resumable()),
}


def started_otherwise() -> DataLoader[Any]:
    return DataLoader(
        rows(), batch_size=5, shuffle=True, num_workers=1, prefetch_factor=3, multiprocessing_context="forkserver"
    )


@pytest.mark.parametrize("kind", [*LOADERS, pytest.param("started otherwise", marks=pytest.mark.slow)])
def test_a_resume_is_exact(tmp_path: Path, kind: str) -> None:
    check_resume(tmp_path, LOADERS.get(kind, started_otherwise))


@pytest.mark.parametrize("make", [lambda: ReadyBatches(ready()), lambda: DataLoader(Rows(), batch_size=5)])
def test_batches_without_a_state_are_read_again(tmp_path: Path, make: Any) -> None:
    check_resume(tmp_path, make, reads_again=True, max_steps=9)


def test_a_state_spares_the_reading_of_batches(tmp_path: Path) -> None:
    batches = [Resumable(), Resumable()]
    train(tmp_path, ReadyBatches(batches[0]), max_steps=33, num_train_epochs=1, save_steps=10)
    train(tmp_path, ReadyBatches(batches[1]), "checkpoint-30", max_steps=33)
    assert batches[0].reads == 33
    assert batches[1].reads < 14


def test_ready_batches_are_micro_batches(tmp_path: Path) -> None:
    one, steps = train(tmp_path / "one", ReadyBatches(ready()), learning_rate=0.0)
    assert [len(step) for step in steps.samples] == [5, 5, 5, 5, 2] * 2
    assert one.run.state.samples == 44
    _, pairs = train(tmp_path / "two", ReadyBatches(ready()), gradient_accumulation_steps=2, learning_rate=0.0)
    assert [len(step) for step in pairs.samples] == [10, 10, 2] * 2
    metrics = one.evaluate(ReadyBatches(ready(3)))
    assert metrics["eval_loss"] == pytest.approx(one.evaluate(rows())["eval_loss"], abs=1e-12)
    assert one.predict(ReadyBatches(ready(3))).predictions.shape == (22, 3)
    plan = one.plan()
    assert plan.problems == ()
    assert plan.steps.last == 10


# Several ranks


def ready_on_a_rank(folder: str, resume: str | None = None, **options: Any) -> Any:
    trainer, steps = train(folder, ReadyBatches(ready(3)), resume, **options)
    return steps.samples, trainer.run.state.samples, weights(trainer)


def distributed_on_a_rank(folder: str) -> Any:
    sampler = DistributedSampler(rows(), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    _, steps = train(folder, DataLoader(rows(), batch_size=4, sampler=sampler), learning_rate=0.0)
    return steps.samples


def shuffled_on_a_rank(folder: str) -> None:
    batches = ready(2)
    random.SystemRandom().shuffle(batches)
    train(folder, ReadyBatches(batches))


@pytest.mark.distributed
def test_ranks_take_ready_batches_in_turn(tmp_path: Path) -> None:
    two = on_ranks(2, ready_on_a_rank, str(tmp_path), learning_rate=0.0, save_steps=2)
    batches = [[int(each) for each in batch["x"][:, 0]] for batch in ready(3)]
    assert two[0][0] == [*batches[0::2], *batches[0::2]]
    assert two[1][0] == [*batches[1::2], *batches[1::2]]
    assert two[0][1] == two[1][1] == 44
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reads batches again
        rest = ready_on_a_rank(str(tmp_path), "checkpoint-2", learning_rate=0.0)
    both = [first + second for first, second in zip(batches[0::2], batches[1::2], strict=True)]
    assert rest[0] == [*both[2:], *both], "one process takes both batches of a step"
    assert rest[1] == 44


@pytest.mark.distributed
def test_ranks_divide_the_samples_of_a_distributed_sampler(tmp_path: Path) -> None:
    two = on_ranks(2, distributed_on_a_rank, str(tmp_path))
    for epoch in (slice(0, 3), slice(3, 6)):
        order = DistributedSampler(rows(), 1, 0)
        order.set_epoch(epoch.start // 3)
        steps = [a + b for a, b in zip(two[0][epoch], two[1][epoch], strict=True)]
        assert [sorted(set(step)) for step in steps] == [sorted([*order][start : start + 8]) for start in (0, 8, 16)]


@pytest.mark.distributed
def test_ranks_with_other_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="does not give all processes the same samples in the same order"):
        on_ranks(2, shuffled_on_a_rank, str(tmp_path))


# Batches that do not fit


class Greedy(Classifier):
    """A classifier without dropout, which runs out of memory with more than `room` samples in training."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.training and len(x) > self.room and type(x) is torch.Tensor:  # not while it is estimated
            raise torch.OutOfMemoryError("out of memory")
        return {"loss": F.cross_entropy(self.layer(x / 10), labels)}


def fitted(folder: Path, model: nn.Module, data: Any, **options: Any) -> Trainer:
    args = arguments(folder, max_steps=4, learning_rate=0.05, **options)
    trainer = Trainer(model, args, data)
    trainer.train()
    return trainer


def test_ready_batches_are_split_if_they_do_not_fit(tmp_path: Path) -> None:
    cut = fitted(tmp_path, Greedy(4), ReadyBatches(ready(10)), auto_find_batch_size=True)
    whole = fitted(tmp_path, Greedy(99), ReadyBatches(ready(10)))
    assert cut.run.state.micro_batch is not None
    assert cut.run.state.micro_batch <= 4
    torch.testing.assert_close(
        cut.run.model.get_parameter("layer.weight"), whole.run.model.get_parameter("layer.weight"), rtol=0, atol=1e-9
    )


def test_a_batch_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    batches = [batch | {"mask": torch.ones(3)} for batch in ready(10)]

    class Masked(Greedy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: Any = None) -> Any:
            return super().forward(x, labels)

    with pytest.raises(ValueError, match="has to split a ready batch of 10 samples, but it holds a Tensor"):
        fitted(tmp_path, Masked(4), ReadyBatches(batches), auto_find_batch_size=True)


def test_batches_that_are_given_as_samples_warn(tmp_path: Path) -> None:
    batches = [{"x": torch.ones(5, 4, dtype=torch.float64), "labels": torch.zeros(5, dtype=torch.long)}] * 4
    for number, dataset in enumerate((batches, iter(batches))):
        with pytest.warns(UserWarning, match="length 5: .*ReadyBatches"), contextlib.suppress(Exception):
            Trainer(Classifier(), arguments(tmp_path / str(number), max_steps=1), dataset).train()
    train(tmp_path / "ready", ReadyBatches(iter(batches)), max_steps=1)


@pytest.mark.parametrize(("size", "is_said"), [(4, True), (8, False), (11, False)])
def test_a_batch_size_that_the_loader_overrides_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, is_said: bool
) -> None:
    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=size, log_level="info")
    Trainer(Classifier(), args, DataLoader(rows(), 11)).train()
    message = f"per_device_train_batch_size={size} has no effect: train_dataset is a DataLoader, with batches of 11"
    assert (message in caplog.text) == is_said

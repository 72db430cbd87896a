"""Streams that shuffle by an epoch counter of their own are resumed at the start of an epoch and anywhere else."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios.task import StopAt
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer_kit import ReadyBatches, Trainer, TrainingArguments
from trainer_kit.data.collate import stack
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, MicroBatch
from trainer_kit.data.sampling import Layout

LENGTH, SIZE, STEPS = 80, 4, 70  # epochs of 20 steps


class Counting(IterableDataset[Any]):
    """Counts an epoch where it ends."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def order(self) -> list[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return random.Random(f"order {self.epoch}").sample(range(LENGTH), LENGTH)[first::step]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = self.order()
        while self.place < len(order):
            self.place += 1
            yield {"x": torch.tensor([order[self.place - 1], torch.rand(())])}
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Late(Counting):
    """Counts an epoch where the next one begins, so that its state at an end is that of a position."""

    def __init__(self) -> None:
        super().__init__()
        self.resumes = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.resumes:
            self.epoch, self.place = self.epoch + 1, 0
        self.resumes = False
        order = self.order()
        for number in order[self.place :]:
            self.place += 1
            yield {"x": torch.tensor([number, torch.rand(())])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resumes = True


class Given(Counting):
    """Its epoch is set, and its state holds it too."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = self.epoch
        yield from super().__iter__()
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Untrusted(Counting):
    """Loses two samples in the middle of an epoch, so that it is read again from the epoch's start."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"epoch": state["epoch"], "place": state["place"] and state["place"] + 2})


class Loader(DataLoader[Any]):
    """Loads its state when it is iterated over, as torchdata's StatefulDataLoader does."""

    state: Any = None
    ended = False
    iterator: Any = None

    def _get_iterator(self) -> Any:
        self.ended = False
        if self.state is not None:
            self.dataset.load_state_dict(self.state["dataset"])  # type: ignore[attr-defined]
            self.ended, self.state = self.state["ended"], None
        return super()._get_iterator()

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = self._get_iterator()
        if self.ended:
            self.iterator = self._get_iterator()
        yield from self.iterator
        self.ended = True

    def state_dict(self) -> dict[str, Any]:
        if self.iterator is None:
            self.iterator = self._get_iterator()
        return {"dataset": self.dataset.state_dict(), "ended": self.ended}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.iterator = state, None


class Ready(Counting):
    """Yields batches."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (batch := [sample for sample, _ in zip(self.samples(), range(SIZE), strict=False)]) != []:
            yield stack(batch)
        self.epoch, self.place = self.epoch + 1, 0

    def samples(self) -> Iterator[dict[str, Any]]:
        for number in self.order()[self.place : self.place + SIZE]:
            self.place += 1
            yield {"x": torch.tensor([number, torch.rand(())])}


KINDS: dict[str, Callable[[], Any]] = {
    "counting": Counting,
    "late": Late,
    "given": Given,
    "ready": lambda: ReadyBatches(Ready()),
    "loader": lambda: ReadyBatches(Loader(Counting(), batch_size=SIZE)),
    "loader, given": lambda: ReadyBatches(Loader(Given(), batch_size=SIZE)),
}


def loader(kind: str, workers: int, rank: int, ranks: int) -> StreamLoader:
    dataset = KINDS[kind]()
    size = 1 if isinstance(dataset, ReadyBatches) else SIZE
    return StreamLoader(dataset, Layout(size, 1, ranks, rank), LoaderConfig(stack, 5, workers))


def resumed(after: MicroBatch, one: StreamLoader, steps: int) -> list[MicroBatch]:
    """The steps after a micro-batch, as a checkpoint between two steps continues."""
    window = after.global_batch
    epoch, position, state = window.epoch, window.stop, copy.deepcopy(window.data_state)
    if window.closes_epoch:
        epoch, position, state = epoch + 1, 0, one.state_after(epoch, state)
    return list(one.micro_batches(epoch, position, steps, one.resume(epoch, position, state)))


def rows(micro_batches: list[MicroBatch]) -> list[list[list[float]]]:
    return [micro.batch["x"].tolist() for micro in micro_batches]


def check(kind: str, workers: int, stops: list[int], rank: int = 0, ranks: int = 1) -> None:
    straight = list(loader(kind, workers, rank, ranks).micro_batches(0, 0, STEPS // ranks))
    for stop in stops:
        rest = resumed(straight[stop - 1], loader(kind, workers, rank, ranks), STEPS // ranks - stop)
        assert rows(rest) == rows(straight[stop:]), stop
        assert [m.global_batch.data_state for m in rest] == [m.global_batch.data_state for m in straight[stop:]]


@pytest.mark.parametrize("kind", KINDS)
def test_it_continues_exactly_from_any_step(kind: str) -> None:
    check(kind, 0, [1, 3, 12, 19, 20, 21, 23, 32, 40, 41, 43, 60])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_continue_exactly(kind: str, rank: int) -> None:
    check(kind, 0, [3, 10, 11, 20, 23], rank, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counting", "late", "given"])
def test_workers_begin_each_epoch_with_new_copies(kind: str) -> None:
    check(kind, 2, [3, 12, 20, 23, 40])


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_have_orders_of_their_own(kind: str) -> None:
    straight = rows(list(loader(kind, 0, 0, 1).micro_batches(0, 0, 60)))
    epochs = [[row[0] for batch in straight[start : start + 20] for row in batch] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_epoch_that_is_read_again_begins_where_it_began() -> None:
    straight = list(loader("counting", 0, 0, 1).micro_batches(0, 0, STEPS))
    one = StreamLoader(Untrusted(), Layout(SIZE), LoaderConfig(stack, 5))
    with pytest.warns(UserWarning, match="does not bring back the samples .* 72 samples of epoch 1 are read again"):
        rest = resumed(straight[37], one, STEPS - 38)
    assert rows(rest) == rows(straight[38:])


@pytest.mark.parametrize("stop", [3, 12, 20, 32])
def test_states_of_earlier_versions_continue_a_stream_with_set_epoch(stop: int) -> None:
    straight = list(loader("given", 0, 0, 1).micro_batches(0, 0, STEPS))
    window = straight[stop - 1].global_batch
    assert window.data_state is not None
    window.data_state = {name: window.data_state[name] for name in ("workers", "turn")}
    assert rows(resumed(straight[stop - 1], loader("given", 0, 0, 1), 20)) == rows(straight[stop : stop + 20])


def test_a_run_that_goes_back_begins_the_epoch_where_it_began() -> None:
    one = loader("counting", 0, 0, 1)
    straight = list(one.micro_batches(0, 0, 50))
    for stop in (20, 23, 32):
        assert rows(resumed(straight[stop - 1], one, 50 - stop)) == rows(straight[stop:])
    assert rows(list(one.micro_batches(0, 0, 5))) == rows(straight[:5])


def test_a_state_is_loaded_before_any_is_asked_for() -> None:
    """torchdata's MultiNodeWeightedSampler gives other samples otherwise."""

    class Asked(Counting):
        calls: list[str]

        def state_dict(self) -> dict[str, Any]:
            self.__dict__.setdefault("calls", []).append("state_dict")
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.__dict__.setdefault("calls", []).append("load_state_dict")
            super().load_state_dict(state)

    straight = list(loader("counting", 0, 0, 1).micro_batches(0, 0, 30))
    for stop in (3, 20, 30):
        dataset = Asked()
        resumed(straight[stop - 1], StreamLoader(dataset, Layout(SIZE), LoaderConfig(stack, 5)), 3)
        assert dataset.calls[0] == "load_state_dict"


def test_a_state_that_is_not_taken_up_is_a_warning() -> None:
    class Renamed(Given):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({"epoch": state["epoch"], "place": state["position"]})

    straight = list(loader("given", 0, 0, 1).micro_batches(0, 0, 22))
    one = StreamLoader(Renamed(), Layout(SIZE), LoaderConfig(stack, 5))
    with pytest.warns(UserWarning, match=r"starts as it was given, since .* its state \(KeyError: 'position'\)"):
        assert rows(resumed(straight[19], one, 2)) == rows(straight[20:])


def trained(output_dir: Path, *callbacks: Any) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Train, from a checkpoint where there is one; return what was trained on, and the weights."""
    seen: list[list[float]] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch["x"][:, 0].tolist())
        value: torch.Tensor = model(batch["x"] / LENGTH).square().mean()
        return value

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    args = TrainingArguments(
        output_dir=str(output_dir), max_steps=65, per_device_train_batch_size=SIZE, learning_rate=0.01,
        save_strategy="epoch", report_to="none", disable_tqdm=True, log_level="warning", use_cpu=True,
    )  # fmt: skip
    Trainer(model, args, Counting(), compute_loss=loss, callbacks=[*callbacks]).train(resume_from_checkpoint=True)
    return seen, [each.detach() for each in model.parameters()]


def test_checkpoints_between_epochs_continue_exactly(tmp_path: Path) -> None:
    seen, weights = trained(tmp_path / "straight")
    parts = []
    for stop in (20, 23, 40, 52, 0):
        part, last = trained(tmp_path / "resumed", *([StopAt(stop)] if stop else []))
        parts += part
    assert parts == seen
    assert all(map(torch.equal, last, weights))

"""The same loop with accelerate and with trainer_kit's `Accelerator`: losses, learning rates and weights to the bit."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.ecosystem


@dataclasses.dataclass
class Settings:
    """A loop: its `Accelerator`, its data, and what it does in a step."""

    rows: int = 46
    batch_size: int = 4
    epochs: int = 2
    steps: int = 1  # batches per optimizer step
    precision: str = "no"
    splits: bool = False
    even: bool = True
    drops_last: bool = False
    shuffles: bool = False
    streams: bool = False
    clips: float | None = None
    by_hand: bool = False  # accumulates with no_sync instead of accumulate
    steps_at_end: bool = True  # whether the last batch of a loader ends a step
    rate_rule: bool = True  # step_scheduler_with_optimizer
    momentum: bool = False
    uses_norm: bool = False
    cycle: int | None = None  # length of a OneCycleLR in place of a falling rate


class Rows(IterableDataset[Any]):
    """The rows of a dataset, without indices."""

    def __init__(self, rows: Dataset[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from (self.rows[number] for number in range(len(self.rows)))  # type: ignore[arg-type]


def make_loaders(settings: Settings) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(settings.rows, 6, generator=generator)
    rows: Dataset[Any] = TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())
    train = DataLoader(
        Rows(rows) if settings.streams else rows,
        batch_size=settings.batch_size,
        shuffle=settings.shuffles,
        drop_last=settings.drops_last,
    )
    return train, DataLoader(rows, batch_size=settings.batch_size)


def make_accelerator(library: str, settings: Settings) -> Any:
    home = importlib.import_module("accelerate" if library == "accelerate" else "trainer_kit.accelerator")
    utils = importlib.import_module(f"{home.__name__}.utils")
    utils.set_seed(3)
    plugin = utils.GradientAccumulationPlugin(num_steps=settings.steps, sync_with_dataloader=settings.steps_at_end)
    return home.Accelerator(
        cpu=True,
        mixed_precision=settings.precision,
        gradient_accumulation_plugin=plugin,
        step_scheduler_with_optimizer=settings.rate_rule,
        dataloader_config=utils.DataLoaderConfiguration(
            split_batches=settings.splits, even_batches=settings.even, use_seedable_sampler=settings.shuffles
        ),
    )


def run(library: str, settings: Settings) -> list[Any]:
    """Train and evaluate; return each number that the loop sees, as exact text, and the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of accelerate
        accelerator = make_accelerator(library, settings)
        torch.manual_seed(5)
        norm = nn.BatchNorm1d(8) if settings.uses_norm else nn.Tanh()
        model = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 2))
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if settings.momentum
            else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        train, evaluation = make_loaders(settings)
        length = 12 if settings.streams else len(train)
        scheduler = make_scheduler(optimizer, length, settings.cycle)
        prepared = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
        seen = list(loop(accelerator, settings, *prepared))
        if library == "accelerate":
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            accelerate.state.GradientState._reset_state()
    return seen + [parameter.detach().clone() for parameter in model.parameters()]


def make_scheduler(optimizer: torch.optim.Optimizer, length: int, cycle: int | None) -> Any:
    if cycle is not None:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=cycle)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / length))


def loop(
    accelerator: Any, settings: Settings, model: Any, optimizer: Any, train: Any, evaluation: Any, scheduler: Any
) -> Iterator[str]:
    for epoch in range(settings.epochs):
        model.train()
        for number, batch in enumerate(train):
            if settings.by_hand:
                yield from take_by_hand(accelerator, settings, number, batch, model, optimizer, scheduler)
            else:
                with accelerator.accumulate(model):
                    yield from take(accelerator, settings, batch, model, optimizer, scheduler)
            yield f"epoch {epoch} batch {number}: rate {scheduler.get_last_lr()}"
        model.eval()
        for inputs, labels in evaluation:
            with torch.no_grad():
                predictions = model(inputs)
            gathered = accelerator.gather_for_metrics((predictions, labels))
            yield f"evaluation {[exact(each) for each in gathered]}"
        yield f"mean {exact(accelerator.reduce(predictions.mean(), 'mean'))}"


def take(accelerator: Any, settings: Settings, batch: Any, model: Any, optimizer: Any, scheduler: Any) -> Iterator[str]:
    inputs, labels = batch
    loss = nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    yield f"loss {exact(loss)} of {len(labels)}, ends step: {accelerator.sync_gradients}"
    if settings.clips is not None and accelerator.sync_gradients:
        yield f"norm {exact(accelerator.clip_grad_norm_(model.parameters(), settings.clips))}"
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def take_by_hand(
    accelerator: Any, settings: Settings, number: int, batch: Any, model: Any, optimizer: Any, scheduler: Any
) -> Iterator[str]:
    """Accumulate as scripts did before `accumulate`: with `no_sync`, and a loss divided by the script."""
    inputs, labels = batch
    if (number + 1) % 2:
        with accelerator.no_sync(model):
            loss = nn.functional.cross_entropy(model(inputs), labels) / 2
            accelerator.backward(loss)
        yield f"loss {exact(loss)}"
        return
    loss = nn.functional.cross_entropy(model(inputs), labels) / 2
    accelerator.backward(loss)
    yield f"loss {exact(loss)}"
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def exact(tensor: torch.Tensor) -> list[str]:
    return [float(value).hex() for value in tensor.detach().flatten()]


CASES = {
    "plain": Settings(),
    "accumulation": Settings(steps=3),
    "accumulation that goes on over the end": Settings(steps=4, steps_at_end=False),
    "accumulation by hand": Settings(by_hand=True, rows=48),
    "clipping": Settings(clips=0.1, steps=2),
    "bfloat16": Settings(precision="bf16", steps=2),
    "split batches": Settings(splits=True),
    "drop_last": Settings(drops_last=True),
    "shuffled": Settings(shuffles=True, steps=2),
    "a stream": Settings(streams=True, steps=2),
    "a stream that does not divide": Settings(streams=True, rows=45),
    "a stream whose last round has one batch": Settings(streams=True, rows=41, steps=2),
    "a rate at each call": Settings(rate_rule=False, steps=2),
    "momentum": Settings(momentum=True, clips=1.0),
    "batch norm": Settings(uses_norm=True, momentum=True, rows=48),
    "fewer rows than a round": Settings(rows=3),
    "a cycle that ends at the end": Settings(cycle=24),
    "a cycle of batches": Settings(cycle=24, steps=2),
    "a cycle of optimizer steps": Settings(cycle=13, steps=2),
}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_loop_computes_the_same_bits(name: str, processes: int) -> None:
    both = [on_ranks(processes, run, library, CASES[name]) for library in ("accelerate", "ours")]
    for rank, (theirs, ours) in enumerate(zip(*both, strict=True)):
        assert len(theirs) > CASES[name].epochs * 3
        for expected, got in zip(theirs, ours, strict=True):
            same = torch.equal(expected, got) if isinstance(expected, torch.Tensor) else expected == got
            assert same, f"rank {rank}: accelerate {expected}, here {got}"

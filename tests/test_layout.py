"""A run goes on under other numbers of processes, batch sizes and accumulation, in the middle of an epoch."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit.ranks import on_ranks
from scenarios.rank_task import Exact
from scenarios.task import SAMPLES, StopAt, Stream, digest, make_trainer

from trainer_kit import Callback, Run, Trainer
from trainer_kit.data.sampling import permutation
from trainer_kit.optim import Schedule

PEAK = 1e-2
EPOCHS = 3


class Fixed(torch.utils.data.Dataset[Any]):
    """Samples that are always the same, each with its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.labels = torch.randint(0, 3, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.labels[index], "number": index}


class Notes(Callback):
    """The samples and the learning rate of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], float]] = []

    def on_pre_optimizer_step(self, run: Run) -> None:
        assert run.optimizer is not None
        assert isinstance(run.model, Exact)
        assert run.model.seen.grad is not None
        numbers = run.model.seen.grad.nonzero().flatten().tolist()
        self.steps.append((numbers, run.optimizer.param_groups[0]["lr"]))


class Left(NamedTuple):
    """What a start leaves behind."""

    steps: list[tuple[list[int], float]]
    parameters: list[float]
    place: int
    length: int
    last_rate: float


def go_on(folder: Path, batch_size: int, accumulation: int, until: int) -> Left:
    """Trains on to a step, where it saves."""
    torch.set_num_threads(1)
    notes = Notes()
    trainer = exact_trainer(folder, notes, StopAt(until), batch_size=batch_size, accumulation=accumulation)
    trainer.train(resume_from_checkpoint=True)
    schedule = trainer.run.lr_scheduler
    assert isinstance(schedule, Schedule)
    vector = torch.nn.utils.parameters_to_vector(trainer.run.model.parameters())
    plan = trainer._loop.checkpoints.plan
    return Left(notes.steps, vector.tolist(), plan.schedule_step, plan.schedule_length, schedule.get_last_lr()[0])


def exact_trainer(folder: Path, *callbacks: Callback, batch_size: int, accumulation: int) -> Trainer:
    return make_trainer(
        folder,
        *callbacks,
        model=Exact(),
        dataset=Fixed(),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        eval_strategy="no",
        lr_scheduler_type="linear",
        warmup_steps=0,
        learning_rate=PEAK,
        max_grad_norm=0.0,
    )


def by_hand(steps: list[tuple[list[int], float]]) -> list[float]:
    """A loop of plain torch over the same samples with the same rates: one optimizer from the beginning to the end."""
    model, samples = Exact(), Fixed()
    groups = [
        {"params": [p for name, p in model.named_parameters() if ("bias" in name) == is_bias], "weight_decay": decay}
        for is_bias, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, fused=True)
    for numbers, rate in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        model(samples.x[numbers], samples.labels[numbers], torch.tensor(numbers))["loss"].backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()  # type: ignore[no-any-return]


def alone(window: int) -> list[tuple[list[int], float]]:
    """The steps of one process that takes so many samples in each."""
    orders = [permutation(SAMPLES, 42, epoch).tolist() for epoch in range(EPOCHS)]
    steps = [sorted(order[start : start + window]) for order in orders for start in range(0, SAMPLES, window)]
    return [(numbers, PEAK * (1 - place / len(steps))) for place, numbers in enumerate(steps)]


CHAINS = {  # processes, batch size, accumulation, steps taken
    "same window": [(4, 2, 1, 4), (2, 2, 2, 7), (1, 1, 8, 7), (1, 8, 1, 100)],
    "other windows": [(4, 2, 2, 2), (2, 3, 1, 7), (1, 5, 2, 4), (3, 2, 2, 100)],
}


@pytest.mark.scenario
@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_four_two_one_three_processes_train_each_sample_once(
    tmp_path: Path, chain: list[tuple[int, int, int, int]]
) -> None:
    steps: list[tuple[list[int], float]] = []
    trained = 0
    for processes, batch_size, accumulation, taken in chain:
        layout = (batch_size, accumulation, len(steps) + taken)
        results = on_ranks(processes, go_on, tmp_path, *layout) if processes > 1 else [go_on(tmp_path, *layout)]
        left = results[0]
        assert all(result == left for result in results)
        for number, (numbers, rate) in enumerate(left.steps):
            assert rate == pytest.approx(PEAK * (1 - (left.place + number) / left.length), rel=1e-12)
            # The schedule goes by samples: that is where they stand, give or take a step.
            assert abs(rate - PEAK * (1 - trained / (SAMPLES * EPOCHS))) <= PEAK / left.length
            assert len(numbers) <= processes * batch_size * accumulation
            trained += len(numbers)
        assert trained % SAMPLES or taken == 100  # in the middle of an epoch
        steps += left.steps
    counted = [number for numbers, _ in steps for number in numbers]
    for epoch in range(EPOCHS):
        assert sorted(counted[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert len(counted) == EPOCHS * SAMPLES
    assert (left.last_rate, left.place + len(left.steps)) == (0.0, left.length)
    torch.testing.assert_close(left.parameters, by_hand(steps), rtol=0, atol=1e-12)
    if len({processes * batch_size * accumulation for processes, batch_size, accumulation, _ in chain}) == 1:
        assert steps == [(numbers, pytest.approx(rate, rel=1e-12)) for numbers, rate in alone(8)]


class Sized(Stream):
    """A stream that says how long it is, without a state where it is not asked for one."""

    def __len__(self) -> int:
        return self.samples


class Stateless(torch.utils.data.IterableDataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for place in range(SAMPLES):
            yield {"x": torch.randn(8) + place, "labels": torch.tensor(place % 3)}


SCHEDULES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 5, "lr_scheduler_kwargs": {"num_decay_steps": 6}},
    {"lr_scheduler_type": "one_cycle", "warmup_steps": 0},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train_dataset has no state_dict")
@pytest.mark.parametrize("dataset", [None, Sized, Stateless], ids=["map", "stateful", "stateless"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda given: given["lr_scheduler_type"])
def test_after_a_change_a_resume_ends_with_the_same_bits(
    tmp_path: Path, dataset: Any, schedule: dict[str, Any]
) -> None:
    def train(folder: Path, *stops: int, **layout: int) -> Trainer:
        for until in stops:
            arguments: dict[str, Any] = schedule | layout
            trainer = make_trainer(folder, StopAt(until), dataset=dataset and dataset(), **arguments)
            trainer.train(resume_from_checkpoint=True)
        return trainer

    once, often = tmp_path / "once", tmp_path / "often"
    train(once, 11)
    shutil.copytree(once, often)
    other = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}
    expected = train(once, 1000, **other)
    assert expected.run.lr_scheduler.last_epoch == EPOCHS * 21
    found = train(often, 12, 19, 35, 1000, **other)
    assert digest(found) == digest(expected)


def rates_of(folder: Path, *callbacks: Callback, **changes: Any) -> list[float]:
    rates = []

    class Rates(Callback):
        def on_pre_optimizer_step(self, run: Run) -> None:
            assert run.optimizer is not None
            rates.append(run.optimizer.param_groups[0]["lr"])

    make_trainer(folder, Rates(), *callbacks, **changes).train(resume_from_checkpoint=True)
    return rates


def test_back_in_the_first_layout_the_first_schedule_goes_on(tmp_path: Path) -> None:
    given: dict[str, Any] = SCHEDULES[0] | {"eval_strategy": "no"}
    straight = rates_of(tmp_path / "straight", **given)
    first = rates_of(tmp_path / "run", StopAt(2), **given)
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    middle = rates_of(tmp_path / "run", StopAt(2 + 12), **given, **small)
    last = rates_of(tmp_path / "run", **given)
    assert first == straight[:2]
    assert middle == [pytest.approx(PEAK * place / 20) for place in range(8, 20)]  # the warmup takes 40 samples
    assert last == straight[5:]


def test_max_steps_are_counted_as_they_are_taken(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 20, "lr_scheduler_type": "linear", "warmup_steps": 8}
    straight = rates_of(tmp_path / "straight", **given)
    both = rates_of(tmp_path / "run", StopAt(5), **given)
    both += rates_of(tmp_path / "run", **given, gradient_accumulation_steps=1)
    assert both == straight


def test_samples_passed_over_are_not_trained_on_in_any_layout(tmp_path: Path) -> None:
    """As after a rollback: the schedule fits, counters go on, and a resume knows of it."""

    class PassOver(StopAt):
        def on_step_end(self, run: Run) -> None:
            run.state.passed_over, run.state.rollbacks = [(0, 24, 32), (1, 0, 8)], 2
            super().on_step_end(run)

    notes: list[tuple[list[int], float]] = []
    for number, (batch_size, accumulation) in enumerate([(4, 2), (5, 1), (4, 2)]):
        until = (2, 6, 1000)[number]
        stop = PassOver(until) if number == 0 else StopAt(until)
        each = Notes()
        trainer = exact_trainer(tmp_path, each, stop, batch_size=batch_size, accumulation=accumulation)
        trainer.train(resume_from_checkpoint=True)
        notes += each.steps
    counted = itertools.chain.from_iterable(numbers for numbers, _ in notes)
    orders = [permutation(SAMPLES, 42, epoch).tolist() for epoch in range(EPOCHS)]
    expected = [*orders[0][:24], *orders[0][32:], *orders[1][8:], *orders[2]]
    assert sorted(counted) == sorted(expected)
    assert trainer.run.state.samples == len(expected)
    assert (trainer.run.state.step, trainer.run.state.epoch) == (trainer.run.total_steps, EPOCHS)
    assert trainer.run.lr_scheduler.get_last_lr() == [0.0, 0.0]

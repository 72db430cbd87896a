"""Test the learning rate schedule that a run gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.data.build import make_train_loader
from trainer_kit.data.collate import stack
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.run_length import RunLength, make_plan
from trainer_kit.loop.lr_schedule import make_run_scheduler


def planned(**arguments: Any) -> tuple[Run, RunLength]:
    args = TrainingArguments(per_device_train_batch_size=4, learning_rate=1.0, **arguments)
    run = Run(args, Strategy(), torch.nn.Linear(1, 1), train_dataset=[torch.ones(1)] * 40)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    return run, make_plan(run, make_train_loader(run, LoaderConfig(stack, 0)), None)


def rates(run: Run, scheduler: Any, steps: int) -> list[float]:
    assert run.optimizer is not None
    found = []
    for _ in range(steps):
        found.append(run.optimizer.param_groups[0]["lr"])
        run.optimizer.step()
        scheduler.step()
    return found


def test_the_arguments_schedule_ends_with_the_run() -> None:
    run, plan = planned(num_train_epochs=2, lr_scheduler_type="linear")
    scheduler = make_run_scheduler(run, plan)
    assert rates(run, scheduler, 21) == pytest.approx([1 - step / 20 for step in range(21)])


def test_it_begins_at_the_step_of_the_run() -> None:
    run, plan = planned(num_train_epochs=2, lr_scheduler_type="linear")
    scheduler = make_run_scheduler(run, dataclasses.replace(plan, schedule_step=5))
    assert rates(run, scheduler, 1) == pytest.approx([0.75])


def test_a_scheduler_of_the_users_own_is_taken_as_it_is() -> None:
    run, plan = planned()
    assert run.optimizer is not None
    own = StepLR(run.optimizer, 3)
    assert make_run_scheduler(run, plan, own) is own
    assert isinstance(make_run_scheduler(run, plan, lambda optimizer: StepLR(optimizer, 3)), StepLR)


def test_a_schedule_by_metric_needs_evaluations() -> None:
    run, plan = planned()
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau steps at evaluations; set eval_strategy and give eval_d"):
        make_run_scheduler(run, plan, ReduceLROnPlateau)


def test_a_group_without_a_learning_rate_needs_a_schedule_that_sets_one() -> None:
    def sets(optimizer: torch.optim.Optimizer) -> Any:
        optimizer.param_groups[0]["lr"] = 0.5
        return StepLR(optimizer, 1)

    run, plan = planned()
    assert run.optimizer is not None
    for given in (None, lambda optimizer: StepLR(optimizer, 1)):
        run.optimizer.param_groups[0] |= {"lr": None}
        with pytest.raises(ValueError, match=r"optimizer=SGD has a parameter group with lr=None.* AdafactorSchedule"):
            make_run_scheduler(run, plan, given)
    assert make_run_scheduler(run, plan, sets).get_last_lr() == [0.5]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_record_has_the_learning_rate_of_its_step(tmp_path: Path, as_tensor: bool) -> None:
    class Records(Callback):
        def __init__(self) -> None:
            self.used: list[float] = []
            self.logged: list[float] = []

        def on_pre_optimizer_step(self, run: Run) -> None:
            assert run.optimizer is not None
            self.used.append(float(run.optimizer.param_groups[0]["lr"]))

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            self.logged.append(record["learning_rate"])

    model, records = Linear(), Records()
    args = arguments(tmp_path, max_steps=5, warmup_steps=2, learning_rate=0.05, logging_steps=1)
    rate = torch.tensor(0.05) if as_tensor else 0.05
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    Trainer(model, args, points(), optimizer=optimizer, callbacks=[records]).train()
    assert records.logged == records.used == pytest.approx([0, 0.025, 0.05, 0.1 / 3, 0.05 / 3])

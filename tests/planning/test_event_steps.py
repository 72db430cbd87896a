"""What a plan says of steps and rates is what the training then does."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios.task import Net, Noisy, StopAt, Stream, make_trainer
from torch.optim import lr_scheduler

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callback import CallbackList
from trainer_kit.planning import TrainingPlan
from trainer_kit.planning.batches import First

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Watcher(Callback):
    """Notes after which steps what happens, and the rate of each step."""

    priority = 1000

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {"log": [], "evaluate": [], "save": [], "epoch ends": []}
        self.rates: list[float] = []

    def on_step_begin(self, run: Run) -> None:
        assert run.optimizer is not None
        self.rates.append(float(run.optimizer.param_groups[0]["lr"]))

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.steps["log"].append(run.state.step)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.steps["evaluate"].append(run.state.step)

    def on_save(self, run: Run, directory: Path) -> None:
        self.steps["save"].append(int(directory.name.removeprefix("checkpoint-")))

    def on_epoch_end(self, run: Run) -> None:
        self.steps["epoch ends"].append(run.state.step)


def watched(trainer: Trainer, resume: bool | None = None) -> Watcher:
    watcher = Watcher()
    trainer.events = CallbackList([*trainer.events.callbacks, watcher])
    trainer.train(resume)
    return watcher


def agrees(plan: TrainingPlan, watcher: Watcher, unknown: tuple[str, ...] = ()) -> None:
    for event in plan.events:
        if event.name in unknown:
            continue
        happened = watcher.steps[event.name]
        assert list(event.first) == happened[: len(event.first)], event
        assert event.count == len(happened), event
        assert event.last == (happened[-1] if happened else None), event
    assert plan.schedule is not None
    assert [rate for _, rate in plan.schedule.points] == watcher.rates
    assert plan.schedule.lowest == min(watcher.rates)
    assert plan.schedule.highest == max(watcher.rates)


CASES: list[dict[str, Any]] = [
    {},
    {"logging_first_step": True, "eval_steps": 5, "save_steps": 3, "lr_scheduler_type": "linear"},
    {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 1.5},
    {"logging_strategy": "no", "eval_strategy": "no", "save_strategy": "no", "max_steps": 7},
    {
        "nonfinite": "rollback",
        "save_steps": 9,
        "dataloader_drop_last": True,
        "warmup_steps": 0,
        "lr_scheduler_type": "one_cycle",
    },
    {"max_steps": 20, "eval_strategy": "epoch", "lr_scheduler_type": "polynomial"},
]


@pytest.mark.parametrize("changes", CASES)
def test_a_training_does_what_was_planned(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, async_save=False, **({"save_total_limit": None} | changes))
    plan = trainer.plan()
    watcher = watched(trainer)
    agrees(plan, watcher)
    assert plan.steps.last == trainer.run.total_steps == plan.steps.left
    assert plan.steps.samples == trainer.run.state.samples
    if plan.storage is not None:
        assert plan.storage.at_once == len([*tmp_path.glob("checkpoint-*")])


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a run of a few steps."""
    how, few = st.sampled_from(("steps", "epoch", "no")), st.integers(1, 5)
    evaluates = draw(how)
    saves = draw(st.sampled_from(("steps", "epoch", "no") + ("best",) * (evaluates != "no")))
    length = draw(st.sampled_from(({"num_train_epochs": 0.4}, {"num_train_epochs": 1.7}, {"num_train_epochs": 3.0})))
    return {
        "logging_strategy": draw(how), "logging_steps": draw(few), "logging_first_step": draw(st.booleans()),
        "eval_strategy": evaluates, "eval_steps": draw(few), "save_strategy": saves, "save_steps": draw(few),
        "load_best_model_at_end": evaluates != "no" and saves != "no" and draw(st.booleans()),
        "nonfinite": draw(st.sampled_from(("stop", "rollback"))) if saves != "no" else "stop",
        "dataloader_drop_last": draw(st.booleans()),
    } | draw(st.one_of(st.just(length), st.builds(lambda steps: {"max_steps": steps}, st.integers(1, 9))))  # fmt: skip


LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 3))  # samples of a micro-batch, micro-batches of a step


class Mean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


def small(folder: str, layout: tuple[int, int], changes: dict[str, Any], *callbacks: Callback) -> Trainer:
    samples = [{"x": torch.tensor(float(number))} for number in range(11)]
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=layout[0], gradient_accumulation_steps=layout[1], use_cpu=True,
        report_to="none", disable_tqdm=True, log_level="error", async_save=False, save_total_limit=None, **changes,
    )  # fmt: skip
    return Trainer(Mean(), args, samples, samples[:2], callbacks=callbacks)


@pytest.mark.filterwarnings("ignore:load_best_model_at_end=True, but no evaluation:UserWarning")
@given(changes=schedules(), layout=LAYOUTS, later=st.none() | LAYOUTS, stop=st.integers(1, 6))
@settings(max_examples=10)
def test_each_event_comes_when_it_was_planned(
    changes: dict[str, Any], layout: tuple[int, int], later: tuple[int, int] | None, stop: int
) -> None:
    """In a run from its first step, and in one that resumes with another layout in the middle of an epoch."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_kit.planning.event_steps._SHOWN", 100)
        patch.setattr("trainer_kit.planning.planner.look_at_first", lambda run, loader: First([]))  # for speed
        trainer, taken = small(folder, layout, changes), 0
        if later is not None:
            earlier = small(folder, layout, changes, StopAt(stop))
            earlier.train()
            trainer, taken = small(folder, later, changes), earlier.run.state.samples
        plan = trainer.plan(later is not None)
        happened = watched(trainer, later is not None).steps
        planned = {event.name: [*event.first] for event in plan.events}
        keeps_best = changes["save_strategy"] == "best" or changes["load_best_model_at_end"]
        may_save = planned["evaluate"] if keeps_best else []
        assert {*planned["save"]} <= {*happened["save"]} <= {*planned["save"], *may_save}
        assert happened | {"save": planned["save"]} == planned
        assert plan.steps.samples == trainer.run.state.samples - (taken if plan.steps.first else 0)


def test_best_checkpoints_are_bounded(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="best", eval_steps=4, async_save=False, save_total_limit=None)
    plan = trainer.plan()
    (event,) = (each for each in plan.events if each.name == "save")
    saved = watched(trainer).steps["save"]
    assert event.count is None
    assert event.last == saved[-1]
    assert plan.storage is not None
    assert plan.storage.at_once is not None
    assert len(saved) <= plan.storage.at_once == 24 // 4


def test_minutes_bound_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="minutes", save_minutes=5, save_total_limit=None)
    plan = trainer.plan()
    assert plan.storage is not None
    assert plan.storage.at_once is None
    assert "every 5 minutes and at the end: 24" in str(plan)


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 2), (8, 2)])
def test_a_resume(tmp_path: Path, batch: int, accumulation: int) -> None:
    make_trainer(tmp_path).train()  # 24 steps of 8 samples, checkpoints of 16, 20, 24
    changes: dict[str, Any] = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(tmp_path, num_train_epochs=5, async_save=False, save_total_limit=None, **changes)
    resumed = tmp_path / "checkpoint-20"
    (tmp_path / "checkpoint-24").rename(tmp_path / "aside")
    plan = trainer.plan(True)
    assert plan.start.checkpoint == str(resumed)
    assert plan.start.others == ()
    assert plan.storage is not None
    assert plan.storage.there == 2
    watcher = watched(trainer, True)
    agrees(plan, watcher)
    assert plan.storage.at_once == len([*tmp_path.glob("checkpoint-*")])
    assert (plan.steps.first, plan.steps.last) == (20, trainer.run.state.step)
    assert len(watcher.rates) == plan.steps.left


def test_a_resume_from_another_folder_leaves_checkpoints_of_other_runs_out(tmp_path: Path) -> None:
    for name in ("source", "other"):
        make_trainer(tmp_path / name, max_steps=8).train()
    plan = make_trainer(tmp_path / "other", max_steps=12).plan(tmp_path / "source")
    assert plan.start.checkpoint == str(tmp_path / "source" / "checkpoint-8")
    assert plan.start.others == ("checkpoint-4", "checkpoint-8")
    assert plan.storage is not None
    assert plan.storage.there == 0


@pytest.mark.parametrize("kind", ["exponential", "cosine"])
def test_a_resume_with_a_scheduler_of_the_user(tmp_path: Path, kind: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "exponential":  # each rate is made from the one before
            return lr_scheduler.ExponentialLR(optimizer, 0.9)
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)

    for epochs in (2, 3):
        trainer = make_trainer(tmp_path, num_train_epochs=epochs)
        trainer.lr_scheduler = make
        resume = True if epochs == 3 else None
        plan = trainer.plan(resume)
        agrees(plan, watched(trainer, resume))
    assert plan.steps.first == 16


def test_a_resume_that_cannot_be(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    model = Net()
    model.head = torch.nn.Linear(8, 4)
    trainer = make_trainer(tmp_path, num_train_epochs=4, model=model)
    trainer.lr_scheduler = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)
    wrong_weights, wrong_schedule = trainer.plan(True).problems
    assert "head.weight" in wrong_weights
    assert "the lr_scheduler is ExponentialLR, but" in wrong_schedule


def test_a_dataset_without_a_length(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dataset=Stream(), max_steps=11)
    plan = trainer.plan()
    agrees(plan, watched(trainer), unknown=("epoch ends",))
    assert plan.steps.per_epoch is plan.steps.samples is plan.data.train is None
    assert "not known in advance" in str(plan)


def with_scheduler(tmp_path: Path, kind: str) -> Trainer:
    trainer = make_trainer(tmp_path, save_strategy="no")
    if kind == "function":
        trainer.lr_scheduler = lambda optimizer: lr_scheduler.StepLR(optimizer, 4)
        return trainer
    model = trainer.run.model
    groups = [{"params": [*model.head.parameters()], "lr": 0.1}, {"params": [*model.first.parameters()]}]  # type: ignore[union-attr]
    trainer.optimizer = optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    trainer.lr_scheduler = {
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000),
        "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24),
        "sequence": lambda: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [5]
        ),
        "chain": lambda: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9)]),
    }[kind]()
    return trainer


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # torch's own, in 2.6
@pytest.mark.parametrize("kind", ["function", "cosine", "one cycle", "sequence", "chain"])
def test_a_scheduler_of_the_user(tmp_path: Path, kind: str) -> None:
    trainer = with_scheduler(tmp_path, kind)
    before = repr((trainer.optimizer, vars(trainer.lr_scheduler))) if kind != "function" else ""
    plan = trainer.plan()
    if kind != "function":
        assert repr((trainer.optimizer, vars(trainer.lr_scheduler))) == before
    agrees(plan, watched(trainer))
    assert plan.schedule is not None
    assert ("of the first of 2 groups, which begin at 0.1, 0.01" in plan.schedule.note) == (kind in ("cosine", "chain"))
    assert any("T_max=1,000, training ends after 24 steps" in each for each in plan.warnings) == (kind == "cosine")


def test_a_scheduler_that_ends_before_training(tmp_path: Path) -> None:
    trainer = with_scheduler(tmp_path, "one cycle")
    assert trainer.optimizer is not None
    trainer.lr_scheduler = lr_scheduler.OneCycleLR(trainer.optimizer, 0.1, total_steps=10)
    (problem,) = trainer.plan().problems
    assert problem.startswith("OneCycleLR raises after step 11: ValueError")
    with pytest.raises(ValueError, match="Tried to step 11 times"):
        trainer.train()


def test_a_schedule_by_a_metric(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.lr_scheduler = lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    schedule = trainer.plan().schedule
    assert schedule is not None
    assert schedule.note == "depends on eval_loss: times 0.1 after more than 2 evaluations without an improvement"


def test_as_if_on_more_processes(tmp_path: Path) -> None:
    plan = make_trainer(tmp_path, dataset=Noisy(100)).plan(num_processes=3)
    assert plan.batch.samples == 4 * 2 * 3
    assert plan.steps.per_epoch == math.ceil(100 / 24)
    assert "planned as if 3 processes were launched" in plan.hardware.reason
    assert any("DDP needs" in each for each in plan.warnings) is False

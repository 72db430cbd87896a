"""What a plan warns of, and what it says train() would not get through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer_kit import Run, Strategy, Trainer, TrainingArguments, log_mean
from trainer_kit.data.sampling import Layout
from trainer_kit.planning import TrainingPlan
from trainer_kit.planning.checks import layout_warnings
from trainer_kit.planning.sections import Data

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8))  # type: ignore[assignment]
        self.body[2].weight = self.body[1].weight  # type: ignore[index, union-attr]


class Words(nn.Module):
    """Takes tokens, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=16)
        self.table = nn.Embedding(50, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(self.table(input_ids % 50).mean(1), labels)


class Peeking(Net):
    """Asks for a value in each pass."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen = x[x[:, 0] > -10]  # a size that hangs on values
        return super().forward(chosen, labels)


def samples(count: int = 64, label: int | None = None) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(6, generator=generator), "labels": torch.tensor(number % 3 if label is None else label)}
        for number in range(count)
    ]


def texts(largest: int, length: int = 8, padding: int = 0) -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(length) % largest + 1
    mask = (torch.arange(length) >= padding).long()
    return [{"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(1)}] * 64


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from samples()


def plan(tmp_path: Path, **changes: Any) -> TrainingPlan:
    """Of a training in which nothing is odd but what `changes` make so."""
    given = {
        name: changes.pop(name, default)
        for name, default in {
            "model": Net(), "train": samples(), "evaluation": samples(16), "compute_metrics": None, "optimizer": None,
            "lr_scheduler": None, "resume": None, "processes": None, "data_collator": None, "compute_loss": None,
        }.items()
    }  # fmt: skip
    arguments: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"), "num_train_epochs": 3, "per_device_train_batch_size": 8,
        "logging_steps": 4, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    trainer = Trainer(
        given["model"], TrainingArguments(**(arguments | changes)), given["train"], given["evaluation"],
        compute_metrics=given["compute_metrics"], optimizer=given["optimizer"], lr_scheduler=given["lr_scheduler"],
        data_collator=given["data_collator"], compute_loss=given["compute_loss"],
    )  # fmt: skip
    return trainer.plan(given["resume"], given["processes"])


def test_nothing_is_odd(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert found.warnings == ()
    assert found.problems == ()
    assert "warnings" not in str(found)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.label_ids == 0))}


WARNED: dict[str, tuple[dict[str, Any], str]] = {
    "short step": ({"train": samples(60)}, "the last step of each epoch is short: 4 of 8 samples"),
    "small dataset": ({"train": samples(6)}, "an epoch has 6 samples, fewer than the 8 of a step"),
    "idle ranks": (
        {"train": samples(66), "processes": 4},
        "in the last micro-batch of each epoch 3 of 4 processes have no samples",
    ),
    "ranks that never work": ({"train": samples(10), "processes": 4}, "in every step 2 of 4 processes have no samples"),
    "dropped": ({"train": samples(60), "dataloader_drop_last": True}, "leaves out 4 of 60 samples in each epoch"),
    "batch norm": ({"train": samples(57), "model": Normed()}, "is a single sample, which the batch norm 'body.1' may"),
    "half an epoch": ({"max_steps": 4}, "max_steps ends training in the first epoch: it sees 32 of the 64 samples"),
    "tied": ({"model": Tied()}, "tied weights: body.1.weight = body.2.weight (trained and saved once)"),
    "no gradient": ({"model": Unused()}, "depend on spare.weight and spare.bias: they get no gradient"),
    "no gradient with processes": ({"model": Unused(), "processes": 2}, "DDP needs find_unused_parameters=True"),
    "no labels": ({"train": samples(label=-100)}, "all labels of the first 4 batches are -100"),
    "padding": ({"model": Words(), "train": texts(40, 16, 9), "evaluation": texts(9)}, "56% of the first batches is"),
    "long text": ({"model": Words(), "train": texts(40, 20), "evaluation": texts(9)}, "20 tokens is longer than"),
    "tokens": ({"model": Words(), "train": texts(50, 60), "evaluation": texts(9)}, "hold the token 50, but the model"),
    "rare records": ({"logging_steps": 30}, "logging_steps=30, but training ends after 24 steps"),
    "no records": ({"logging_strategy": "no"}, "logging_strategy='no': no loss is logged"),
    "no evaluation": ({"eval_strategy": "no"}, "eval_dataset is given, but eval_strategy='no'"),
    "only at the start": (
        {"eval_strategy": "no", "eval_on_start": True}, "is at step 0: what the last 24 steps give is not evaluated",
    ),
    "rare evaluations": (
        {"eval_strategy": "steps", "eval_steps": 30},
        "eval_steps=30, but training ends after 24 steps: the only evaluation comes at the end",
    ),
    "no checkpoint": ({"save_strategy": "no"}, "save_strategy='no': no checkpoint is saved"),
    "rare checkpoints": ({"save_strategy": "steps", "save_steps": 30}, "save_steps=30, but training ends after 24"),
    "late best": (
        {"save_strategy": "best", "num_train_epochs": 1, "eval_on_start": True},
        "saves nothing before the only evaluation",
    ),
    "long warmup": ({"warmup_steps": 24}, "warmup_steps=24 is no shorter than training, which takes 24 steps"),
    "no warmup": ({"warmup_steps": 2, "lr_scheduler_type": "constant"}, "lr_scheduler_type='constant' has no warmup"),
    "no rate": ({"learning_rate": 0.0}, "the learning rate is 0 in every step: nothing is learned"),
    "half precision": ({"model": Net().bfloat16(), "train": [
        {"x": each["x"].bfloat16(), "labels": each["labels"]} for each in samples()
    ], "evaluation": None, "eval_strategy": "no"}, "the weights are kept in bfloat16, in which small updates"),
    "fp16": ({"mixed_precision": "fp16"}, "mixed_precision='fp16' on the CPU"),
    "metric": (
        {"metric_for_best_model": "accuracy", "compute_metrics": lambda prediction: {}["accuracy"]},
        "an evaluation of the first 8 samples, tried with a copy of the model, raised KeyError: 'accuracy'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_it_warns(tmp_path: Path, case: str) -> None:
    changes, sentence = WARNED[case]
    found = plan(tmp_path, **changes)
    assert [each for each in found.warnings if sentence in each], found.warnings
    assert found.problems == ()


def test_no_evaluation_decides_what_is_best(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="eval_strategy='epoch' has no effect without eval_dataset"):
        found = plan(tmp_path, save_strategy="best", evaluation=None)
    assert "save_strategy='best', but no evaluation decides which checkpoint is the best" in found.warnings


def test_evaluating_what_is_trained_on(tmp_path: Path) -> None:
    data = samples()
    assert any("eval_dataset is train_dataset" in each for each in plan(tmp_path, train=data, evaluation=data).warnings)


def test_weights_that_the_optimizer_lacks(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    found = plan(tmp_path, model=model, optimizer=optimizer)
    assert found.warnings == (
        "the optimizer does not have body.weight and body.bias: they require a gradient, and are never updated",
    )


def test_a_schedule_that_ends_too_soon(tmp_path: Path) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 10 - step))

    (warning,) = plan(tmp_path, lr_scheduler=make).warnings
    assert warning == "the learning rate is 0 in the last 14 of 24 steps: they change nothing"


def test_a_schedule_longer_than_training(tmp_path: Path) -> None:
    from transformers import get_linear_schedule_with_warmup

    (warning,) = plan(tmp_path, lr_scheduler=lambda opt: get_linear_schedule_with_warmup(opt, 2, 240)).warnings
    assert warning.startswith(
        "the schedule is longer than training: LambdaLR has num_training_steps=240, training ends"
    )


def test_a_folder_with_checkpoints(tmp_path: Path) -> None:
    for step in (4, 8):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    (warning,) = plan(tmp_path).warnings
    assert "holds checkpoint-4 and checkpoint-8, and this run does not resume from there" in warning
    assert warning.endswith("(set resume_from_checkpoint=True to resume)")


def test_a_folder_with_checkpoints_of_transformers_alone(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    (warning,) = plan(tmp_path).warnings
    assert warning.endswith("does not resume from there: it would move them to earlier-N/")


@pytest.mark.parametrize(
    ("cuts", "told"), [(False, "; at most "), (True, ": auto_find_batch_size cuts them into parts of at most ")]
)
def test_more_memory_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: bool, told: str) -> None:
    for place in ("cost", "advice"):
        package = "planning" if place == "cost" else "memory"
        monkeypatch.setattr(f"trainer_kit.{package}.{place}.capacity", lambda device: 1500)
    found = plan(tmp_path, auto_find_batch_size=cuts)
    assert found.memory.peak is not None
    assert found.memory.peak > 1500
    (warning,) = found.warnings
    assert f"of memory, but cpu has 1.465 KiB{told}" in warning


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def short_of_columns(batch: list[Any]) -> dict[str, torch.Tensor]:
    return {"y": torch.stack([each["x"] for each in batch]), "labels": torch.tensor([1] * len(batch))}


def unreadable() -> Any:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("a rotten file")

    return Broken(samples())


PROBLEMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "frozen": (lambda: {"model": frozen()}, "Net has no parameter that requires a gradient"),
    "no such metric": (
        lambda: {"metric_for_best_model": "f1", "compute_metrics": accuracy},
        "metric_for_best_model='eval_f1' is not among what an evaluation gives: eval_accuracy, eval_loss",
    ),
    "no metrics at all": (
        lambda: {"metric_for_best_model": "f1"}, "metric_for_best_model='eval_f1' is not among what an",
    ),
    "datasets by name": (
        lambda: {"metric_for_best_model": "loss", "evaluation": {"a": samples(9), "b": samples(9)}},
        "metric_for_best_model='eval_loss' is not among what an evaluation gives: eval_a_loss, eval_a_runtime",
    ),
    "no scheduler": (lambda: {"lr_scheduler": lambda optimizer: 3}, "lr_scheduler gave 3"),
    "no evaluation": (
        lambda: {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau, "eval_strategy": "no"},
        "ReduceLROnPlateau steps at evaluations",
    ),
    "schedule": (lambda: {"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs has 'power'"),
    "columns": (lambda: {"data_collator": short_of_columns}, "missing a required argument: 'x'"),
    "unused columns": (
        lambda: {"data_collator": short_of_columns, "remove_unused_columns": False},
        "the batch has the column y, which Net.forward does not",
    ),
    "no checkpointing": (lambda: {"gradient_checkpointing": True}, "finds no block that Net repeats"),
    "data": (
        lambda: {"train": unreadable()},
        "the first batches cannot be read: DataError: the dataset raised at index",
    ),
    "data in a worker": (
        lambda: {"train": unreadable(), "dataloader_num_workers": 1},
        "DataError: the dataset raised at index",
    ),
    "loss": (lambda: {"compute_loss": lambda model, batch: "a word"}, "compute_loss returned a str"),
    "8-bit": (lambda: {"optim": "adamw_8bit"}, "optim='adamw_8bit' needs a package of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", PROBLEMS)
def test_it_says_what_would_fail(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, f"{package}.optim", None)
    changes, sentence = PROBLEMS[case]
    found = plan(tmp_path, **changes())
    assert [each for each in found.problems if sentence in each], found.problems
    assert "train() would fail" in str(found)


@pytest.mark.slow
def test_samples_that_come_only_once_are_left_alone(tmp_path: Path) -> None:
    rows = iter(samples())
    found = plan(tmp_path, train=rows, max_steps=8, eval_strategy="no", evaluation=None)
    assert found.problems == ()
    assert [each for each in found.warnings if "can be read only once: it was not read" in each]
    assert len([*rows]) == 64


def test_a_metric_that_is_there(tmp_path: Path) -> None:
    assert plan(tmp_path, metric_for_best_model="accuracy", compute_metrics=accuracy).problems == ()


class Parts(Net):
    """Returns a part of its loss, and logs another."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        log_mean("logged", 1.0)
        return {**super().forward(x, labels), "kl": torch.tensor(2.0)}


@pytest.mark.parametrize("name", ["kl", "logged"])
def test_a_metric_that_the_model_logs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, model=Parts(), metric_for_best_model=name)
    assert (found.problems, found.warnings) == ((), ())
    monkeypatch.setattr("trainer_kit.planning.metric._CHEAP", 1)
    found = plan(tmp_path, model=Parts(), metric_for_best_model=name)
    assert found.warnings == (f"whether an evaluation gives 'eval_{name}' is unknown until the first one",)
    assert found.problems == ()


@pytest.mark.filterwarnings("ignore:eval_on_start=True has no effect")
def test_an_evaluation_at_the_start_without_a_dataset(tmp_path: Path) -> None:
    found = plan(tmp_path, eval_strategy="no", eval_on_start=True, evaluation=None)
    assert found.warnings == ("eval_on_start=True has no effect without eval_dataset",)


def test_an_evaluation_at_the_start_is_no_evaluation_of_nothing(tmp_path: Path) -> None:
    found = plan(tmp_path, eval_strategy="no", eval_on_start=True)
    assert not any("never evaluates" in each for each in found.warnings)


def test_a_model_that_cannot_be_tried_on_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, model=Peeking())
    assert found.problems == ()
    assert found.model.without_gradient == ()
    assert found.memory.peak is None
    assert found.compute is None
    monkeypatch.setattr("trainer_kit.planning.model._CHEAP", 0)
    (warning,) = plan(tmp_path, model=Peeking()).warnings
    assert warning.startswith("the model could not be run on shapes alone: ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": []}, "train_dataset is empty; give at least one sample"),
        ({"train": None}, "train.. needs train_dataset"),
        ({"train": Endless()}, "train_dataset has no length, so that epochs cannot be counted; set max_steps"),
        (
            {"train": Endless(), "max_steps": 4, "group_by_length": True},
            "group_by_length=True needs a train_dataset with",
        ),
        ({"resume": "nowhere"}, "resume_from_checkpoint='nowhere' does not exist; give a checkpoint's folder"),
    ],
)
def test_there_is_no_plan(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(tmp_path, **changes)


KEPT = Layout(1, 1, 3).keep_steps_of(2, 1)  # 2 samples for 3 processes


@pytest.mark.parametrize(
    ("layout", "samples_of_epoch", "model", "said"),
    [
        (KEPT, 64, Net(), ["in every step 1 of 3 processes has no samples, and waits for the others"]),
        (Layout(4, 1, 3).keep_steps_of(2, 1), 64, Normed(), []),
        (
            Layout(4, 1, 3).keep_steps_of(2, 1), 65, Normed(),
            [
                "the last step of each epoch is short: 1 of 8 samples",
                "in the last step of each epoch 2 of 3 processes have no samples, and wait for the others",
                "in the last step of each epoch a process has a micro-batch of a single sample, which the batch norm "
                "'body.1' may refuse in training; set on_resize='scale', or start as many processes as before",
            ],
        ),
    ],
    ids=["more processes than samples", "even", "short"],
)  # fmt: skip
def test_a_kept_step_is_warned_about(layout: Layout, samples_of_epoch: int, model: Any, said: list[str]) -> None:
    run = Run(TrainingArguments(), Strategy(), model)
    data = Data(samples_of_epoch, samples_of_epoch, {})
    assert [*layout_warnings(data, layout, run)] == said

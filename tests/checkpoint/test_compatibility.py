"""What a start must share with its checkpoint is refused before anything is written; what may differ is told."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios.task import Net, Noisy, StopAt, Stream, make_trainer

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.checkpoint import compatibility, user_states
from trainer_kit.checkpoint.compatibility import default_request, report_changes
from trainer_kit.data.run_length import RunLength
from trainer_kit.data.sampling import Layout
from trainer_kit.optim import make_scheduler

STEP = 3


def contents(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below a folder: when it was changed, and what is in it (the lock comes and goes in the folder)."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 steps, left with what a start would clear away: a staging folder and a checkpoint that is no whole."""
    folder = tmp_path_factory.mktemp("made")
    make_trainer(folder, max_steps=STEP, save_steps=1, report_to="all").train()
    (folder / ".staging-checkpoint-4-999999999").mkdir()
    (folder / "checkpoint-9").mkdir()
    return folder


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.output = self.head
        del self.head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        raise AssertionError("never trained")


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 5)


def reordered(trainer: Trainer) -> None:
    """An optimizer with the parameters in another order, named or not."""
    groups = [[*trainer.run.model.named_parameters()][::-1]]
    trainer.optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.0} for group in groups])


def unnamed(trainer: Trainer) -> None:
    trainer.optimizer = torch.optim.AdamW([*trainer.run.model.parameters()][::-1])


def step_schedule(trainer: Trainer) -> None:
    trainer.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)


CASES: list[tuple[dict[str, Any], Callable[[Trainer], None] | None, str]] = [
    ({"dataset": Noisy(61)}, None, "has 61 samples, but .* was made with 62"),
    ({"dataset": Noisy(63)}, None, "has 63 samples, but .* was made with 62"),
    ({"seed": 7}, None, "seed=7, but .* seed=42"),
    ({"optim": "sgd"}, None, "optimizer is SGD, but .* AdamW"),
    ({"model": Wider()}, None, "'head.weight' is of shape"),
    ({"model": Renamed()}, None, "missing there: 'output.weight'"),
    ({"weight_decay": 0.0}, None, "groups of .* parameters"),
    ({}, step_schedule, "lr_scheduler is StepLR, but .* Schedule"),
]


@pytest.mark.parametrize(("changes", "change", "message"), CASES, ids=lambda value: str(value)[:30])
def test_a_refusal_leaves_everything_as_it_was(
    made: Path, tmp_path: Path, changes: dict[str, Any], change: Callable[[Trainer], None] | None, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    before = contents(folder)
    arguments: dict[str, Any] = {"max_steps": 5, "report_to": "all"} | changes
    for output_dir, request in ((folder, True), (tmp_path / "new", folder / f"checkpoint-{STEP}")):
        trainer = make_trainer(output_dir, **arguments)
        if change is not None:
            change(trainer)
        weights = {name: value.clone() for name, value in trainer.run.model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=request)
        assert all(torch.equal(value, weights[name]) for name, value in trainer.run.model.state_dict().items())
    assert contents(folder) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [(reordered, r"the optimizer has 'head.bias' where .* has 'first.weight'"), (unnamed, r"parameter 0 is of shape")],
)
def test_an_optimizer_of_parameters_in_another_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Trainer], None], message: str
) -> None:
    """Where the checkpoint lacks the model's names, as those of earlier versions do."""
    monkeypatch.setattr(user_states, "add_model_names", lambda *given: None)
    first = make_trainer(tmp_path, max_steps=2)
    named = [*first.run.model.named_parameters()]
    first.optimizer = torch.optim.AdamW(named if make is reordered else [each for _, each in named], weight_decay=0.0)
    first.train()
    trainer = make_trainer(tmp_path, max_steps=4)
    make(trainer)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)
    assert contents(tmp_path) == before


def test_another_number_of_workers_of_a_stream_is_refused_at_once(tmp_path: Path) -> None:
    make_trainer(tmp_path, dataset=Stream(), max_steps=2).train()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="states of 1 workers of an iterable dataset, but dataloader_num_workers=2"):
        make_trainer(tmp_path, dataset=Stream(), max_steps=4, dataloader_num_workers=2).train(True)
    assert contents(tmp_path) == before


def resumed(folder: Path, caplog: pytest.LogCaptureFixture, **changes: Any) -> list[str]:
    """What a start says after its "resumed from"."""
    caplog.clear()
    with caplog.at_level("INFO", logger="trainer_kit"):
        make_trainer(folder, log_level="info", **changes).train(resume_from_checkpoint=True)
    return [text for text in caplog.messages if text.startswith("resumed ") and not text.startswith("resumed from")]


@pytest.mark.slow
def test_the_arguments_may_name_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, max_steps=3, save_steps=1).train()
    caplog.clear()
    again = make_trainer(tmp_path, max_steps=3, save_steps=1, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "checkpoint-2" in str(again.plan())
    with caplog.at_level("INFO", logger="trainer_kit"):
        again.train()
    assert any(text.startswith("resumed from") and "checkpoint-2" in text for text in caplog.messages)
    assert not any(text.startswith("resumed with other") for text in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            [
                "resumed with batches of 2 samples instead of 4, with 1 of them a step instead of 2, 2 samples a step "
                "instead of 8: 81 steps are left; the schedule continues at step 12 of 93, in which warmup_steps=3 are "
                "12"
            ],
        ),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            [
                "resumed with batches of 8 samples instead of 4, with 1 of them a step instead of 2, 8 samples a step "
                "as before: 21 steps are left; the schedule continues at step 3 of 24"
            ],
        ),
        (
            {"per_device_train_batch_size": 2, "num_train_epochs": 1},
            [
                "resumed with batches of 2 samples instead of 4, 4 samples a step instead of 8: 10 steps are left; "
                "the schedule continues at step 6 of 16, in which warmup_steps=3 are 6",
                "resumed with other arguments: num_train_epochs 3.0 -> 1.0",
            ],
        ),
        (
            {"per_device_train_batch_size": 2, "max_steps": 5},
            [
                "resumed with batches of 2 samples instead of 4, 4 samples a step instead of 8: 2 steps are left",
                "resumed with other arguments: max_steps -1 -> 5",
            ],
        ),
        (
            {"lr_scheduler_type": "linear", "warmup_steps": 4},
            [
                "resumed with another schedule (lr_scheduler_type 'cosine' -> 'linear', warmup_steps 3 -> 4): from "
                "step 4 on the learning rate follows it"
            ],
        ),
    ],
    ids=["same", "smaller", "same window", "fewer epochs", "max_steps", "schedule"],
)
def test_one_sentence_tells_of_another_layout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: list[str]
) -> None:
    make_trainer(tmp_path, StopAt(STEP), log_level="info").train()
    assert resumed(tmp_path, caplog, **changes) == said


def test_a_checkpoint_without_a_state_of_the_schedule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(steps: int, resumes: bool) -> None:
        trainer = make_trainer(tmp_path, max_steps=steps)
        trainer.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)
        trainer.train(resume_from_checkpoint=resumes)

    train(2, False)
    read = compatibility.read_state
    monkeypatch.setattr(
        compatibility, "read_state", lambda at, name: None if name == "lr_scheduler" else read(at, name)
    )
    with pytest.raises(ValueError, match="does not take the state in"):
        train(4, True)


def test_a_scheduler_of_the_users_own_counts_as_it_likes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(*callbacks: Callback, **changes: Any) -> float:
        trainer = make_trainer(tmp_path, *callbacks, log_level="info", **changes)
        trainer.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        trainer.train(resume_from_checkpoint=True)
        return float(trainer.run.lr_scheduler.get_last_lr()[0])

    train(StopAt(STEP))
    with pytest.warns(UserWarning, match="LambdaLR of your own, which counts steps: those taken had 8 samples, .* 4$"):
        assert train(StopAt(STEP + 2), per_device_train_batch_size=2) == pytest.approx(1e-2 * 0.9 ** (STEP + 2))
    assert "4 samples a step instead of 8: 42 steps are left" in caplog.text
    assert "the schedule continues" not in caplog.text


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            Layout(128, 1, 4),
            Layout(128, 1, 3).keep_steps_of(4, 1),
            "3 processes keep 512 samples a step: 171, 171, 170 each instead of 128; steps take about 1.34 x as long",
        ),
        (
            Layout(128, 1, 3).keep_steps_of(4, 1),
            Layout(128, 1, 4),
            "4 processes keep 512 samples a step: 128 each instead of 171, 171, 170; steps take about 0.75 x as long",
        ),
        (
            Layout(1, 1, 6).keep_steps_of(2, 1),
            Layout(1, 1, 1).keep_steps_of(2, 1),
            "1 process keeps 2 samples a step: 2 each instead of 0 or 1; steps take about 2.00 x as long",
        ),
        (
            Layout(1, 2, 2, has_own_batches=True),
            Layout(1, 2, 3, has_own_batches=True).keep_steps_of(2, 1),
            "3 processes keep 4 whole batches a step: 2, 1, 1 each instead of 2; steps take as long as before",
        ),
        (
            Layout(4 * 8, 1, devices=8),
            Layout(4 * 4, 1, devices=4).keep_steps_of(1, 8),
            "4 devices keep 32 samples a step: 8 each instead of 4; steps take about 2.00 x as long",
        ),
        (
            Layout(4, 1, 3),
            Layout(2, 2, 2).keep_steps_of(3, 1),
            "2 processes keep 12 samples a step: 6 each instead of 4; steps take about 1.50 x as long | resumed with "
            "batches of 2 samples instead of 4, with 2 of them a step instead of 1, 12 samples a step as before: 7 "
            "steps are left",
        ),
        (
            Layout(4, 1, 2).keep_steps_of(3, 1),
            Layout(4, 1, 2),
            "resumed with on_resize='scale', 8 samples a step instead of 12: 7 steps are left",
        ),
        (
            Layout(4, 1, 3),
            Layout(4, 1, 2),
            "resumed with 2 processes that read data instead of 3, 8 samples a step instead of 12: 7 steps are left",
        ),
        (Layout(4, 1, 2).keep_steps_of(3, 1), Layout(4, 1, 2).keep_steps_of(3, 1), ""),
    ],
    ids=[
        "fewer",
        "again",
        "few samples",
        "whole batches",
        "devices",
        "other batches",
        "scaled later",
        "scaled",
        "same",
    ],
)
def test_one_sentence_tells_how_a_step_is_shared(
    caplog: pytest.LogCaptureFixture, before: Layout, now: Layout, said: str
) -> None:
    args = TrainingArguments(max_steps=10, on_resize="scale")
    model = torch.nn.Linear(1, 1)
    run = Run(args, Strategy(), model, lr_scheduler=make_scheduler(torch.optim.SGD(model.parameters()), args, 10))
    run.state.step = 3
    saved = RunLength(before, 10, 3.0, 10, 3, {}).state_dict()
    with caplog.at_level("INFO", logger="trainer_kit"):
        report_changes(run, RunLength(now, 10, 3.0, 10, 3, {}), (saved, args.to_dict()))
    assert " | ".join(caplog.messages) == said


def test_a_restart_goes_on_from_what_is_saved(tmp_path: Path) -> None:
    """Not again from the checkpoint that its first start began from."""
    args = TrainingArguments(str(tmp_path / "run"))
    given = TrainingArguments(str(tmp_path / "run"), resume_from_checkpoint=str(tmp_path / "earlier"))
    assert default_request(args, 0) is None
    assert default_request(args, 1) is True
    assert default_request(given, 0) == default_request(given, 1) == str(tmp_path / "earlier")
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    assert default_request(given, 0) == str(tmp_path / "earlier")
    assert default_request(given, 1) is True

"""The callbacks in the Trainer's own loop."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.ranks import on_ranks
from kit.trainer import arguments
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import EarlyStoppingCallback, PrinterCallback

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callback import Callback
from trainer_kit.callbacks import EMA, Console, EarlyStopping, Freezing, Profiler, Progress, from_transformers, read_log
from trainer_kit.run import Run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.head(torch.relu(self.inner(x))).squeeze(-1) - y).square().mean()}


def dataset(count: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator)
    return [{"x": x, "y": x.sum()} for x in inputs]


def trainer(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    """10 steps of 8 samples in 2 epochs."""
    arguments = {
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 4,
        **arguments,
    }
    args = TrainingArguments(output_dir=str(folder), **arguments)
    return Trainer(Net(), args, dataset(), dataset(16), callbacks=callbacks)


def test_what_a_run_leaves_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path).train()
    records = read_log(tmp_path / "log.jsonl")
    of = {
        event: [record["step"] for record in records if record["event"] == event]
        for event in ("start", "log", "evaluate", "save", "end")
    }
    assert of == {"start": [0], "log": [2, 4, 6, 8, 10, 10], "evaluate": [5, 10], "save": [4, 8, 10], "end": [10]}
    first, second = (record for record in records if record["event"] == "log" and record["step"] in (2, 4))
    for record in (first, second):
        assert record.keys() >= {"loss", "grad_norm", "learning_rate", "peak_memory_gib", "samples_per_second"}
        assert 0 <= record["data_wait"] <= 1
        assert "tokens_per_second" not in record
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    assert written == {r["step"]: pytest.approx(r["loss"]) for r in records if "loss" in r}
    assert [event.step for event in events.Scalars("eval/loss")] == [5, 10]
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "step 0/10  training begins on cpu"
    assert sum("eval_loss" in line for line in shown) == 2
    assert shown[-1].startswith("step 10/10  epoch 2  train_loss")


@pytest.mark.slow
def test_a_resumed_run_has_one_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        trainer(tmp_path, StopAt(6)).train()
    trainer(tmp_path).train(resume_from_checkpoint=True)
    trainer(tmp_path / "straight").train()
    logs = [
        [(record["step"], record["loss"]) for record in read_log(folder / "log.jsonl") if "loss" in record]
        for folder in (tmp_path, tmp_path / "straight")
    ]
    assert logs[0] == logs[1]
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8, 10]


class StopAt(Callback):
    """A signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_optimizer_step(self, run: Run) -> None:
        if run.state.step + 1 == self.step:
            signal.raise_signal(self.number)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves(tmp_path: Path, number: int, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left:
        trainer(tmp_path, StopAt(6, number)).train()
    assert left.value.code == code
    assert signal.getsignal(number) == before
    assert (tmp_path / "checkpoint-6" / "manifest.json").exists()


@pytest.mark.slow
def test_averages_are_evaluated_and_resumed_bitwise(tmp_path: Path) -> None:
    straight = EMA(decay=0.5)
    metrics = {}
    for name, callbacks in (("plain", []), ("averaged", [straight])):
        run = trainer(tmp_path / name, *callbacks)
        run.train()
        metrics[name] = run.evaluate()["eval_loss"]
    assert metrics["plain"] != metrics["averaged"]
    copied = trainer(tmp_path / "copied")
    straight.copy_to(copied.run.model)
    assert copied.evaluate()["eval_loss"] == metrics["averaged"]

    with pytest.raises(SystemExit):
        trainer(tmp_path / "resumed", EMA(decay=0.5), StopAt(6)).train()
    resumed = EMA(decay=0.5)
    trainer(tmp_path / "resumed", resumed).train(resume_from_checkpoint=True)
    averages = [callback.state_dict()["averages"] for callback in (straight, resumed)]
    assert averages[0].keys() == averages[1].keys()
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


@pytest.mark.slow
def test_averages_do_not_change_the_training(tmp_path: Path) -> None:
    runs = [trainer(tmp_path / "plain"), trainer(tmp_path / "averaged", EMA(decay=0.5))]
    for each in runs:
        each.train()
    states = [each.run.model.state_dict() for each in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_evaluation_that_is_broken_off_saves_the_trained_weights(tmp_path: Path) -> None:
    class StopInEvaluation(Callback):
        def on_evaluate_begin(self, run: Run) -> None:
            signal.raise_signal(signal.SIGTERM)

    seen = []

    class Watch(Callback):
        def on_step_end(self, run: Run) -> None:
            seen.append({name: tensor.clone() for name, tensor in run.model.state_dict().items()})

    each = trainer(tmp_path, EMA(decay=0.5), StopInEvaluation(), Watch())
    with pytest.raises(SystemExit):
        each.train()
    assert len(seen) == 5
    assert all(torch.equal(seen[-1][name], tensor) for name, tensor in each.run.model.state_dict().items())


def test_frozen_parameters_stay_until_their_time(tmp_path: Path) -> None:
    before = Net().state_dict()
    for steps, frozen in ((3, True), (5, False)):
        each = trainer(tmp_path / str(steps), Freezing("inner.*", until_step=4), max_steps=steps, weight_decay=0.1)
        each.train()
        after = each.run.model.state_dict()
        assert torch.equal(before["inner.0.weight"], after["inner.0.weight"]) is frozen
        assert not torch.equal(before["head.weight"], after["head.weight"])


class Worse(Callback):
    """Every evaluation is worse than the one before."""

    priority = -1

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        metrics["eval_loss"] = float(run.state.step)


def test_early_stopping_and_a_resume_after_it(tmp_path: Path) -> None:
    first = trainer(tmp_path, Worse(), EarlyStopping(patience=2), eval_steps=1)
    assert first.train().global_step == 3
    again = trainer(tmp_path, Worse(), EarlyStopping(patience=2), eval_steps=1)
    assert again.train(resume_from_checkpoint=True).global_step == 3


SCORES = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.4, 10: 0.3}


class Scores(Callback):
    """Gives an evaluation a number of its own, on the main process, on the device."""

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        metrics["eval_score"] = torch.tensor(SCORES[run.state.step], dtype=torch.float64)


class ScoresRecords(Callback):
    """Gives records a number of its own."""

    def metrics(self, run: Run) -> dict[str, Any]:
        return {"score": torch.tensor(SCORES.get(run.state.step, 0.0), dtype=torch.float64)}


@pytest.mark.parametrize("source", [Scores, ScoresRecords])
@pytest.mark.parametrize("logging_steps", [1, 100])
def test_a_callbacks_number_is_what_all_go_by(
    tmp_path: Path, source: type[Callback], logging_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best checkpoint, its retention, early stopping, transformers' too, and the learning rate."""

    def make_plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, mode="max", patience=0)

    seen: list[tuple[int, Any, Any]] = []

    class Watch(Callback):
        priority = 50

        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            seen.append((run.state.step, metrics["eval_score"], run.state.best_step))

    stopping = EarlyStopping(patience=2)
    args = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, learning_rate=0.01, logging_steps=logging_steps, save_steps=2,
        eval_strategy="steps", eval_steps=2, metric_for_best_model="score", save_best_limit=1, save_total_limit=1,
        load_best_model_at_end=True, report_to=["jsonl", "tensorboard"],
    )  # fmt: skip
    callbacks = [stopping, from_transformers(EarlyStoppingCallback(9)), source(), Watch(), Console(every=0)]
    each = Trainer(Net(), args, dataset(), dataset(16), callbacks=callbacks, lr_scheduler=make_plateau)
    handler = logging.StreamHandler()
    logging.getLogger("trainer_kit").addHandler(handler)
    try:
        assert each.train().global_step == 8
    finally:
        logging.getLogger("trainer_kit").removeHandler(handler)
    assert seen == [(2, 0.1, 2), (4, 0.9, 4), (6, 0.5, 4), (8, 0.4, 4)]
    assert (each.run.state.best_metric, each.run.state.best_step) == (0.9, 4)
    assert (stopping.best, stopping.failures) == (0.9, 2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    assert torch.equal(
        each.run.model.head.weight, load_file(tmp_path / "checkpoint-4/model.safetensors")["head.weight"]
    )
    assert each.run.optimizer is not None
    assert each.run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2)
    records = read_log(tmp_path / "log.jsonl")
    assert [record["eval_score"] for record in records if record["event"] == "evaluate"] == [0.1, 0.9, 0.5, 0.4]
    (end,) = (record for record in records if record["event"] == "end")
    assert (end["ending"], end["reason"]) == ("stopped", "eval_score has not improved on 0.9 in 2 evaluations")
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.value for event in events.Scalars("eval/score")] == pytest.approx([0.1, 0.9, 0.5, 0.4])
    lines = capsys.readouterr().err.splitlines()
    (told,) = (number for number, line in enumerate(lines) if line.startswith("early stopping at step 8"))
    assert "eval_score 0.4" in lines[told - 1]


class ScoresOnMain(Scores):
    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        if run.strategy.is_main:
            super().on_evaluate(run, metrics)


def judged(folder: str) -> tuple[int, int | None, float | None]:
    args = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="score", load_best_model_at_end=True, use_cpu=True, report_to=[],
    )  # fmt: skip
    each = Trainer(Net(), args, dataset(), dataset(16), callbacks=[EarlyStopping(patience=2), ScoresOnMain()])
    return each.train().global_step, each.run.state.best_step, each.run.state.best_metric


@pytest.mark.distributed
def test_all_processes_go_by_a_number_that_one_has(tmp_path: Path) -> None:
    assert on_ranks(2, judged, str(tmp_path)) == [(8, 4, 0.9)] * 2


def test_a_metric_that_no_callback_gives_either(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'eval_f1' is not among the numbers that evaluation and callbacks give"):
        trainer(tmp_path, Scores(), eval_steps=2, metric_for_best_model="f1").train()


def test_a_plan_expects_a_metric_of_a_callback(tmp_path: Path) -> None:
    found = trainer(tmp_path, Scores(), eval_steps=2, metric_for_best_model="score").plan()
    assert found.problems == ()
    assert [each for each in found.warnings if "'eval_score' is not among what an evaluation gives; a callback" in each]
    assert trainer(tmp_path, metric_for_best_model="score").plan().problems


def test_a_callback_of_transformers_sees_what_is_due_and_may_clear_it(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    due: list[tuple[int, bool, bool, bool]] = []

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            due.append((state.global_step, control.should_log, control.should_evaluate, control.should_save))
            if state.global_step < 4:
                control.should_log = control.should_evaluate = control.should_save = False

    args = arguments(
        tmp_path, max_steps=5, logging_steps=2, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, report_to="jsonl",
    )  # fmt: skip
    Trainer(Linear(), args, points(), points(4), callbacks=[from_transformers(Late)]).train()
    assert due == [(step, step in (2, 4, 5), step in (2, 4, 5), step in (2, 4)) for step in range(1, 6)]
    found = [(entry["event"], entry["step"]) for entry in read_log(Path(args.output_dir, "log.jsonl"))]
    assert [step for event, step in found if event == "log"][:2] == [4, 5]
    assert [step for event, step in found if event == "evaluate"] == [4, 5]
    assert [step for event, step in found if event == "save"] == [4, 5]


def test_callbacks_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Rising(EMA):
        """Gives an evaluation that gets worse, before the Trainer looks for the best."""

        def on_evaluate_begin(self, run: Run) -> None:
            with torch.no_grad():
                run.model.head.bias.add_(100.0 * run.state.step)  # type: ignore[union-attr,operator]

    stopping = from_transformers(EarlyStoppingCallback(early_stopping_patience=2))
    each = trainer(
        tmp_path,
        Rising(),
        stopping,
        from_transformers(PrinterCallback()),
        eval_steps=1,
        load_best_model_at_end=True,
    )
    assert each.train().global_step == 3
    printed = capsys.readouterr().out
    assert "'eval_loss'" in printed
    assert "'grad_norm'" in printed


@pytest.mark.slow
def test_a_trace_of_real_steps(tmp_path: Path) -> None:
    trainer(tmp_path, Profiler(3, 4)).train()
    assert "AdamW" in (tmp_path / "profile" / "steps-3-4.json").read_text()
    assert "aten::addmm" in (tmp_path / "profile" / "steps-3-4.txt").read_text()


def test_a_bar_of_ones_own_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, Progress(), Console(every=0)).train()
    shown = capsys.readouterr().err
    assert "train: 100%" in shown
    assert "10/10" in shown
    assert shown.count("step 5/10  eval_loss") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs signals to a group of processes")
def test_ctrl_c_in_a_terminal_reaches_the_workers_too(tmp_path: Path) -> None:
    """The whole group of processes gets SIGINT, as from a terminal; the step in work is finished with their data."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        log = tmp_path / "out" / "log.jsonl"
        deadline = time.monotonic() + 120
        while not log.exists() or not any("loss" in record for record in read_log(log)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, errors
    assert errors.count("SIGINT: will finish this step") == 1
    assert "Traceback" not in errors
    saved = [record for record in read_log(log) if record["event"] == "save"]
    assert len(saved) == 1
    assert (tmp_path / "out" / saved[0]["directory"] / "manifest.json").exists()


SCRIPT = """
import sys, time, torch
from trainer_kit import Trainer, TrainingArguments

class Data:
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.001)
        return {"x": torch.ones(4)}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

if __name__ == "__main__":
    args = TrainingArguments(sys.argv[1], logging_steps=2, dataloader_num_workers=2, report_to=["jsonl"], use_cpu=True)
    Trainer(Net(), args, Data()).train()
"""

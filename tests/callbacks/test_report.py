from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.run_logs import finished

from trainer_kit import Trainer, TrainingArguments, report
from trainer_kit.callback import Callback
from trainer_kit.callbacks import Report
from trainer_kit.run import Run


def run_of(make_run: Callable[..., Run], rank: int = 0) -> tuple[Run, Path]:
    """A run that has written its log, and where its report goes."""
    run = make_run(rank=rank)
    folder = finished(Path(run.args.output_dir))
    return run, folder / "report.html"


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_report_is_there_when_training_ends(make_run: Callable[..., Run], ends_well: bool) -> None:
    run, path = run_of(make_run)
    callback = Report()
    callback.on_train_begin(run)
    assert not path.exists()
    if ends_well:
        callback.on_exit(run)
    else:
        callback.on_exception(run, ValueError())
    assert "<svg" in path.read_text(encoding="utf-8")


def test_a_start_that_was_refused_leaves_the_report_alone(make_run: Callable[..., Run]) -> None:
    run, path = run_of(make_run)
    Report().on_exception(run, ValueError())
    assert not path.exists()


def test_only_the_main_process_writes_one(make_run: Callable[..., Run]) -> None:
    run, path = run_of(make_run, rank=1)
    Report().on_exit(run)
    assert not path.exists()


def test_a_path_of_ones_own(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run, path = run_of(make_run)
    Report(tmp_path / "deep" / "mine.html").on_exit(run)
    assert (tmp_path / "deep" / "mine.html").exists()
    assert not path.exists()


def test_a_report_that_fails_is_one_warning(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = run_of(make_run)
    path.with_name("log.jsonl").write_text("no record\nand more\n")
    Report().on_exit(run)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the report of the run could not be written: ValueError: " in caplog.text
    assert "line 1 is no record of a run" in caplog.text


def test_without_matplotlib_a_line_says_so(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="trainer_kit")
    run, path = run_of(make_run)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    Report().on_exit(run)
    assert [record.getMessage() for record in caplog.records] == [
        "no report was written: it needs matplotlib (pip install matplotlib)"
    ]
    assert not path.exists()


def test_without_a_log_a_line_says_so(make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trainer_kit")
    Report().on_exit(make_run())
    assert "log.jsonl; add 'jsonl' to report_to" in caplog.text


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Numbers and their doubles."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index / 64]), "labels": torch.tensor([index / 32])}


class Doubler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.linear(x)
        return torch.nn.functional.mse_loss(made, labels), made


class BreakOff(Callback):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 6:
            raise ValueError("no <more>")


def train(folder: Path, *callbacks: Callback) -> None:
    args = TrainingArguments(
        output_dir=str(folder), max_steps=8, logging_steps=2, eval_strategy="steps", save_strategy="no",
        report_to=["jsonl", "html"], disable_tqdm=True, log_level="error", use_cpu=True,
    )  # fmt: skip
    Trainer(Doubler(), args, Pairs(), Pairs(), callbacks=callbacks).train()


def test_a_training_has_a_report(tmp_path: Path) -> None:
    train(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "finished" in text
    assert ">Where the time went<" in text
    assert "last 6.25e-06 at step 8" in text  # the learning rate
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_training_that_broke_off_has_one_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no <more>"):
        train(tmp_path, BreakOff())
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "ended by an error" in text
    assert "no &lt;more&gt;" in text


def test_the_formats_are_those_of_the_command() -> None:
    assert report.FORMATS == ("html", "png", "md")

"""Callbacks of transformers that report to trackers, run by this Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.tracked_training import losses, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import MLflowCallback, TensorBoardCallback, WandbCallback

from trainer_kit.callbacks import from_transformers

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: type) -> dict[int, float]:
    """Train with a callback and the log of lines; return the losses of the latter."""
    monkeypatch.chdir(tmp_path)
    make_trainer("run", ["jsonl"], callbacks=[from_transformers(callback)]).train()
    return losses(Path("run"))


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(tmp_path, monkeypatch, TensorBoardCallback)
    [folder] = Path("run/runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert {each.step: each.value for each in events.Scalars("train/loss")} == pytest.approx(expected)
    assert [each.step for each in events.Scalars("eval/loss")] == [3, 6]
    assert "args/text_summary" in events.Tags()["tensors"]
    [text] = events.Tensors("args/text_summary")
    assert '"learning_rate": 0.1' in text.tensor_proto.string_val[0].decode()


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    expected = train(tmp_path, monkeypatch, MLflowCallback)
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("theirs").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["learning_rate"] == "0.1"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {each.step: each.value for each in history} == pytest.approx(expected)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    try:
        expected = train(tmp_path, monkeypatch, WandbCallback)
        run = wandb.run
        assert run.summary["train/global_step"] == 6
        assert run.summary["train/loss"] == pytest.approx(expected[6])
        assert run.config["learning_rate"] == 0.1
        wandb.finish()
    finally:
        wandb.teardown()

"""Callbacks of transformers, run by this Trainer: what they report to trackers, and what they are shown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.tracked_training import losses, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, WandbCallback

from trainer_kit import Trainer, TrainingArguments
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


class Shown(TrainerCallback):
    """Keeps all attributes of args and state at two hooks."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.saves: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append((attributes(args), attributes(state)))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves.append(attributes(state))


def attributes(shown: Any) -> dict[str, Any]:
    names = [name for name in (*dir(shown), "mixed_precision") if hasattr(shown, name) and not name.startswith("_")]
    values = {name: getattr(shown, name) for name in names if name != "distributed_state"}
    return {name: copy.copy(value) for name, value in values.items() if not callable(value)}


def language_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    return LlamaForCausalLM(config)


SETTINGS: list[dict[str, Any]] = [
    {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "warmup_steps": 0.2,
     "optim": "adafactor", "label_smoothing_factor": 0.1, "run_name": "x", "seed": 3, "do_train": True},
    {"num_train_epochs": 1.5, "logging_steps": 0.5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
     "bf16": True, "log_level": "warning", "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 2,
     "save_total_limit": 2, "optim": "adamw_torch_fused", "metric_for_best_model": "eval_loss",
     "weight_decay": 0.1, "max_grad_norm": 0.5, "gradient_checkpointing": True},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=["steps", "epochs"])
def test_args_and_state_are_those_that_transformers_shows(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokens = torch.arange(8)
    data = [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens} for _ in range(32)]
    given = {"save_steps": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "log_level": "error",
             "lr_scheduler_kwargs": {}, "include_num_input_tokens_seen": "non_padding",
             "per_device_eval_batch_size": 4} | settings  # fmt: skip
    theirs, ours = Shown(), Shown()
    transformers.Trainer(
        language_model(), transformers.TrainingArguments(str(tmp_path / "run"), **given),
        train_dataset=data, eval_dataset=data, callbacks=[theirs],
    ).train()  # fmt: skip
    args = TrainingArguments(str(tmp_path / "run"), async_save=True, **given)
    Trainer(language_model(), args, data, data, callbacks=[from_transformers(ours)]).train()
    # What is not the same by design: another default, an estimate made each step, and saves that end after later steps.
    but_for = {
        "log_level_replica", "total_flos", "log_history", "stateful_callbacks", "best_model_checkpoint", "best_metric",
    }  # fmt: skip
    in_older_releases = {"fsdp", "fsdp_config", "logging_dir", "warmup_ratio"}  # unused, or in another form
    for (their_args, their_state), (our_args, our_state) in zip(theirs.steps, ours.steps, strict=True):
        assert different(their_args, our_args, but_for | in_older_releases) == {}
        assert different(their_state, our_state, but_for) == {}
        per_token = our_state["total_flos"] / our_state["num_input_tokens_seen"]
        assert per_token == 6 * language_model().num_parameters(exclude_embeddings=True)
    saves = [save for save in theirs.saves if save["global_step"] in {each["global_step"] for each in ours.saves}]
    assert len(saves) >= 2
    for their_state, our_state in zip(saves, ours.saves, strict=True):
        assert different(their_state, our_state, but_for - {"total_flos"}) == {}


def different(theirs: dict[str, Any], ours: dict[str, Any], but_for: set[str]) -> dict[str, Any]:
    return {
        name: (value, ours.get(name, "missing"))
        for name, value in theirs.items()
        if name not in but_for and ours.get(name, "missing") != value
    }

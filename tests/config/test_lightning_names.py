"""Lightning's settings: each is known, taken with its meaning or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.arguments import TrainingArguments

# The arguments of lightning.pytorch.Trainer 2.6.
NAMES = (
    "accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps "
    "min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches "
    "val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing "
    "enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm "
    "deterministic benchmark inference_mode use_distributed_sampler profiler detect_anomaly barebones plugins "
    "sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry"
)


def test_every_setting_of_lightning_is_known() -> None:
    settings: dict[str, Any] = dict.fromkeys(NAMES.split(), object())
    with pytest.raises(TypeError) as raised:
        TrainingArguments(**settings)
    assert "no setting has a similar name" not in str(raised.value)
    assert "nearest" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, {"num_train_epochs": 2.0, "gradient_accumulation_steps": 4}),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}, {"max_grad_norm": 0.5}),
        ({"gradient_clip_val": None}, {"max_grad_norm": 0.0}),
        ({"precision": "16-mixed"}, {"mixed_precision": "fp16"}),
        ({"precision": "bf16-mixed"}, {"mixed_precision": "bf16"}),
        ({"precision": 32}, {"mixed_precision": "no"}),
        ({"log_every_n_steps": 5, "default_root_dir": "here"}, {"logging_steps": 5, "output_dir": "here"}),
        ({"check_val_every_n_epoch": 1, "val_check_interval": 1.0}, {"eval_strategy": "epoch", "do_eval": True}),
        ({"enable_progress_bar": False, "enable_checkpointing": False}, {"disable_tqdm": True, "save_strategy": "no"}),
        ({"logger": False, "accelerator": "auto", "devices": "auto", "deterministic": False}, {"report_to": []}),
    ],
)
def test_a_setting_that_means_the_same_is_taken(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert TrainingArguments(**settings).to_dict() == {**TrainingArguments().to_dict(), **expected} | (
        {"eval_steps": expected["logging_steps"]} if "logging_steps" in expected else {}
    )


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("precision", "64-true", "use mixed_precision='no', 'fp16', 'bf16' or 'fp8'"),
        ("val_check_interval", 0.25, "use eval_strategy='steps' and eval_steps="),
        ("val_check_interval", 1, "use eval_strategy='steps' and eval_steps="),
        ("check_val_every_n_epoch", 2, "use eval_strategy='steps'"),
        ("max_time", "00:12:00:00", r"MaxTime\(...\)"),
        ("limit_val_batches", 10, "torch.utils.data.Subset"),
        ("fast_dev_run", True, r"callbacks=\[FastDevRun\(\)\]"),
        ("deterministic", True, r"Deterministic\(\)"),
    ],
)
def test_a_setting_without_counterpart_is_refused(name: str, value: Any, sentence: str) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"^TrainingArguments has no field '{name}'; .*{sentence}"):
        TrainingArguments(**settings)

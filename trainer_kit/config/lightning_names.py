"""Lightning's names for the settings of `TrainingArguments`: the arguments of its `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_kit.config.other_names import Fields, OtherName, Refusal, ignored, refused, renamed, switched

_PRECISIONS: dict[int | str, str] = {
    **dict.fromkeys((16, "16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys((32, "32", "32-true"), "no"),
}
_HARDWARE = "the launcher decides, as in `trainer-kit launch --num-processes 8 --num-nodes 2 train.py`"
_SUBSET = "use torch.utils.data.Subset(dataset, range(n))"
_EPOCH_LOOP = "give it to Trainer(callbacks=) as a callback that sets run.requests.stop"


def _precision(value: Any) -> Fields | Refusal:
    if value is None:
        return Fields()
    if isinstance(value, (int, str)) and value in _PRECISIONS:
        return Fields({"mixed_precision": _PRECISIONS[value]})
    return Refusal("use mixed_precision='no', 'fp16', 'bf16' or 'fp8', and model.to(dtype) for other dtypes")


def _check_interval(value: Any) -> Fields | Refusal:
    if value in (None, 1.0) and not isinstance(value, int):
        return Fields()
    return Refusal(
        "use eval_strategy='steps' and eval_steps=, in optimizer steps of the whole training, or below 1 as a fraction "
        "of it, so divided by num_train_epochs"
    )


def _check_epochs(value: Any) -> Fields | Refusal:
    if value is None:
        return Fields()
    return Fields({"eval_strategy": "epoch"}) if value == 1 else Refusal("use eval_strategy='steps' and eval_steps=")


def _clip_value(value: Any) -> Fields | Refusal:
    return Fields({"max_grad_norm": 0.0 if value is None else value})


LIGHTNING_NAMES: Mapping[str, OtherName] = {
    "max_epochs": renamed("num_train_epochs"),
    "accumulate_grad_batches": renamed("gradient_accumulation_steps"),
    "gradient_clip_val": _clip_value,
    "gradient_clip_algorithm": refused("use max_grad_value= to clip each element", "norm"),
    "precision": _precision,
    "log_every_n_steps": renamed("logging_steps"),
    "default_root_dir": renamed("output_dir"),
    "check_val_every_n_epoch": _check_epochs,
    "val_check_interval": _check_interval,
    "enable_progress_bar": switched("disable_tqdm", False, True),
    "enable_checkpointing": switched("save_strategy", None, "no"),
    "max_time": refused("use Trainer(callbacks=[MaxTime(...)]) of trainer_kit.callbacks"),
    "detect_anomaly": refused("use Trainer(callbacks=[DetectAnomaly()]) of trainer_kit.callbacks", False),
    "deterministic": refused("use Trainer(callbacks=[Deterministic()]) of trainer_kit.callbacks", False),
    "benchmark": refused("set torch.backends.cudnn.benchmark in the script", False),
    "limit_train_batches": refused(f"{_SUBSET} as train_dataset, or max_steps= for a single epoch", 1.0),
    "limit_val_batches": refused(f"{_SUBSET} as eval_dataset", 1.0),
    "limit_test_batches": refused(f"{_SUBSET} in predict()", 1.0),
    "limit_predict_batches": refused(f"{_SUBSET} in predict()", 1.0),
    "overfit_batches": refused(f"{_SUBSET} as train_dataset and as eval_dataset", 0, 0.0),
    "fast_dev_run": refused("use Trainer(callbacks=[FastDevRun()]) of trainer_kit.callbacks", False, 0),
    "num_sanity_val_steps": refused("use eval_on_start=True, which evaluates the whole dataset", 0),
    "min_epochs": refused(_EPOCH_LOOP),
    "min_steps": refused(_EPOCH_LOOP),
    "logger": switched("report_to", None, "none"),
    "callbacks": refused("give Trainer(callbacks=)"),
    "plugins": refused("give Trainer(strategy=)"),
    "profiler": refused("use profile='10:20'"),
    "accelerator": refused("the device is found automatically; use_cpu=True trains on the CPU", "auto", "gpu", "cuda"),
    "devices": refused(_HARDWARE, "auto", -1),
    "num_nodes": refused(_HARDWARE, 1),
    "sync_batchnorm": refused("use Trainer(strategy=DDP(sync_batch_norm=True))", False),
    "use_distributed_sampler": refused("each process always reads its own samples", True),
    "reload_dataloaders_every_n_epochs": refused("a dataset may have set_epoch; loaders are made once", 0),
    "enable_model_summary": ignored("trainer.plan() prints the model", True, False),
    "inference_mode": ignored("evaluation always runs without gradients", True, False),
    "barebones": refused("use report_to='none', save_strategy='no' and disable_tqdm=True", False),
    "enable_autolog_hparams": ignored("trackers always get the arguments", True, False),
    "model_registry": refused("there is no model registry; save_model() writes a folder"),
}
"""Translation of each argument of Lightning's Trainer that is not the name of a field."""

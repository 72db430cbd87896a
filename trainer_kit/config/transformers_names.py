"""transformers' names for the settings of `TrainingArguments`, those of earlier releases included."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from trainer_kit.config.other_names import (
    Fields,
    OtherName,
    Refusal,
    by_value,
    ignored,
    options_of,
    plain,
    read_json,
    refused,
    renamed,
    switched,
)
from trainer_kit.config.reporters import OTHER_TRACKERS

_OWN_OPTIMIZER = "it is not available; give Trainer(optimizer=)"
_LOW_RANK = "GaLore, APOLLO and LOMO change the backward pass and are not available; use 'adafactor' or 'adamw_8bit'"
_BITSANDBYTES = "it is not available; give Trainer(optimizer=), made with bitsandbytes.optim"
_OPTIMIZERS = by_value(
    "optim",
    {
        **dict.fromkeys(("adamw_torch_fused", "adamw_torch_xla", "adamw_hf"), "adamw_torch"),
        "adamw_bnb_8bit": "adamw_8bit",
    },
    {
        **dict.fromkeys(("adamw_torch_npu_fused", "adamw_anyprecision", "ademamix", "adagrad"), _OWN_OPTIMIZER),
        "adamw_apex_fused": _OWN_OPTIMIZER,
        **dict.fromkeys(("rmsprop", "grokadamw", "stable_adamw", "schedule_free_radam"), _OWN_OPTIMIZER),
        **dict.fromkeys(("ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit"), _BITSANDBYTES),
        **dict.fromkeys(("paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _BITSANDBYTES),
        **dict.fromkeys(("paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb"), _BITSANDBYTES),
        **dict.fromkeys(("rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), _BITSANDBYTES),
        "adamw_torch_4bit": "it is not available; give Trainer(optimizer=), made with torchao.optim.AdamW4bit",
        "adamw_torch_8bit": "use 'adamw_8bit', which takes bitsandbytes or torchao, whichever is installed",
        **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "lomo", "adalomo"), _LOW_RANK),
        **dict.fromkeys(("galore_adamw_layerwise", "galore_adamw_8bit_layerwise"), _LOW_RANK),
        **dict.fromkeys(("galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"), _LOW_RANK),
    },
)
_SCHEDULES = by_value(
    "lr_scheduler_type",
    {},
    {
        "cosine_warmup_with_min_lr": "use 'cosine_with_min_lr', whose warmup starts at 0",
        "greedy": "it is not available; use 'reduce_lr_on_plateau', or give Trainer(lr_scheduler=)",
    },
)

_HUB = refused("use Trainer(callbacks=[PushToHub('me/my-model')]) of trainer_kit.callbacks", False, "", "every_save")
_FSDP = refused("use strategy='fsdp', or Trainer(strategy=FSDP(...)) for its options", False, "")
_LIGER = "use chunked_cross_entropy=True, which needs no other package"
_PRECISION = "mixed_precision decides: fp16 by torch.autocast"
_FULL_EVAL = "evaluation runs in mixed_precision; call model.to(dtype) before an evaluation of its own"
_RESUME = "a resume continues at the exact sample and reads nothing twice"
_TRACKIO = "use report_to=[TrackioTracker(space_id=..., bucket_id=...)] of trainer_kit.trackers"
_MPS = ignored("an Apple GPU is found automatically", False, True)
_LOADER = "workers live as long as training, and batches come in the order of the samples"


def _checkpointing_options(value: Any) -> Fields | Refusal:
    value = read_json(value)
    if value in (None, {}, {"use_reentrant": False}):
        return Fields()
    if value == {"use_reentrant": True}:
        return Fields(note="checkpointing is never reentrant, with the same results")
    return Refusal("checkpointing is never reentrant; use gradient_checkpointing={'policy': ...}")


def _fsdp_config(value: Any) -> Fields | Refusal:
    return Fields() if value == {} else _FSDP(value)


def _accelerator_config(value: Any) -> Fields | Refusal:
    value = read_json(value)
    options = value if isinstance(value, Mapping) else getattr(value, "__dict__", {"": value})
    changed = {name: own for name, own in options.items() if own not in (_ACCELERATOR_DEFAULTS.get(name), None)}
    return Refusal("batches are dealt to the processes exactly; there is nothing to set") if changed else Fields()


_ACCELERATOR_DEFAULTS = {
    "split_batches": False, "even_batches": True, "use_seedable_sampler": True, "non_blocking": False,
    "use_configured_state": False,
}  # fmt: skip
"""transformers' default settings of its Accelerator."""


def _optional(field: str) -> OtherName:
    """Return the translation of a field of the same name, for which None means its default."""
    return lambda value: Fields() if value is None else Fields({field: value})


def _generation(value: Any) -> Fields | Refusal:
    if hasattr(value, "to_diff_dict"):
        return Refusal("give a dict of arguments of generate, which is added to the model's own generation_config")
    return Fields({"generation_config": value})


def _reporters(value: Any) -> Fields | Refusal:
    entries = value if isinstance(value, (list, tuple)) else [value]
    names = [name for name in map(plain, entries) if isinstance(name, str)]
    for name in names:
        if name in OTHER_TRACKERS:
            return Refusal(OTHER_TRACKERS[name])
    theirs = [name for name in names if name in _REPORTERS]
    if theirs:
        return Refusal(
            f"{', '.join(theirs)} is not available by name; use Trainer(callbacks=[from_transformers(...)]) with the "
            "callback of transformers.integrations"
        )
    return Fields({"report_to": value})


_REPORTERS = ("azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow")
"""Reporters of transformers that are no trackers here."""


def _project(value: Any) -> Fields | Refusal:
    return Fields() if value == "huggingface" else Fields({"project": value})  # transformers' default for trackio


def _log_level(value: Any) -> Fields | Refusal:
    return Fields() if value == "passive" else Fields({"log_level": value})


def _sampling(value: Any) -> Fields | Refusal:
    value = plain(value)
    if value in ("random", "group_by_length"):
        return Fields({"group_by_length": value == "group_by_length"})
    return Fields({"shuffle": False}) if value == "sequential" else Refusal("use Trainer(train_sampler=...)")


def _resume(value: Any) -> Fields | Refusal:
    if value is True:
        return Refusal("give it to train(resume_from_checkpoint=True), or the path of a checkpoint here")
    return Fields({"resume_from_checkpoint": value or None})


def _opt_level(value: Any) -> Fields | Refusal:
    return Fields() if value in (None, "O1") else Refusal("use model.to(torch.float16), or mixed_precision='fp16'")


FIELD_VALUES: Mapping[str, OtherName] = {
    "output_dir": _optional("output_dir"),
    "optim": _OPTIMIZERS,
    "lr_scheduler_type": _SCHEDULES,
    "lr_scheduler_kwargs": lambda value: _optional("lr_scheduler_kwargs")(read_json(value)),
    "gradient_checkpointing": lambda value: _optional("gradient_checkpointing")(read_json(value)),
    "torch_compile": lambda value: Fields({"torch_compile": read_json(value)}),
    "generation_config": _generation,
    "log_level": _log_level,
    "disable_tqdm": _optional("disable_tqdm"),
    "report_to": _reporters,
    "project": _project,
    "resume_from_checkpoint": _resume,
}
"""Translations of values of fields that transformers has too."""

# Settings of transformers 5 that are no fields.
_CURRENT: Mapping[str, OtherName] = {
    "optim_target_modules": refused(_LOW_RANK),
    "average_tokens_across_devices": refused("the loss is always the mean over the tokens of all processes", True),
    "bf16": switched("mixed_precision", "bf16"),
    "fp16": switched("mixed_precision", "fp16"),
    "bf16_full_eval": refused(_FULL_EVAL, False),
    "fp16_full_eval": refused(_FULL_EVAL, False),
    "tf32": switched("float32_matmul_precision", "high", "highest"),
    "activation_checkpointing": _optional("gradient_checkpointing"),
    "activation_checkpointing_kwargs": _checkpointing_options,
    "gradient_checkpointing_kwargs": _checkpointing_options,
    "torch_compile_backend": options_of("torch_compile", "backend"),
    "torch_compile_mode": options_of("torch_compile", "mode"),
    "use_liger_kernel": refused(_LIGER, False),
    "liger_kernel_config": refused(_LIGER, {}),
    "use_cache": ignored("training does not use a cache", False, True),
    "torch_empty_cache_steps": ignored("the cache is emptied where a step does not fit"),
    "log_level_replica": ignored("other processes log errors only", "warning", "passive"),
    "log_on_each_node": ignored("the main process logs", True, False),
    "logging_nan_inf_filter": ignored("nonfinite= decides what happens at a loss that is not finite", True, False),
    "include_num_input_tokens_seen": ignored("always in the records", "no", "all", "non_padding", True, False),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), refused(_TRACKIO)),
    "eval_delay": refused("give a callback that sets args.eval_strategy at the step", 0, 0.0),
    "prediction_loss_only": refused(
        "leave out compute_metrics= and metrics=; without them no predictions are kept", False
    ),
    "eval_use_gather_object": ignored("objects are gathered where they are needed", False, True),
    "save_only_model": refused("a checkpoint always holds what a resume needs; save_model() writes the model", False),
    "save_on_each_node": ignored("disks that machines do not share are found automatically", False, True),
    "enable_jit_checkpoint": ignored("SIGTERM always saves a checkpoint first", False, True),
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "eval_accumulation_steps": ignored("predictions leave the device after each batch"),
    "ignore_data_skip": ignored(_RESUME, False),
    "restore_callback_states_from_checkpoint": ignored("always", False, True),
    "full_determinism": refused("use Trainer(callbacks=[Deterministic()]) of trainer_kit.callbacks", False),
    "data_seed": refused("seed= determines the order of samples too"),
    "accelerator_config": _accelerator_config,
    "parallelism_config": refused("use strategy='fsdp' or Trainer(strategy=FSDP(...))"),
    "dataloader_persistent_workers": ignored(_LOADER, False, True),
    "dataloader_in_order": ignored(_LOADER, True),
    "train_sampling_strategy": _sampling,
    "length_column_name": refused(
        "call the column 'length', as by dataset.rename_column; without one, lengths are measured in the samples",
        "length",
    ),
    "ddp_find_unused_parameters": refused("use Trainer(strategy=DDP(find_unused_parameters=True))", False),
    "ddp_bucket_cap_mb": refused("use Trainer(strategy=DDP(bucket_cap_mb=...))"),
    "ddp_broadcast_buffers": refused("buffers are always broadcast, after each step", True),
    "ddp_static_graph": refused("use Trainer(strategy=DDP(static_graph=True))", False),
    "ddp_backend": refused("the device decides: gloo on CPUs, nccl on NVIDIA GPUs"),
    "ddp_timeout": refused("use Trainer(strategy=DDP(ddp_timeout=...))", 1800),
    "fsdp": _FSDP,
    "fsdp_config": _fsdp_config,
    "deepspeed": refused("DeepSpeed is not available; use strategy='fsdp'"),
    "debug": refused("a loss that is not finite is located without a setting; records have xla/compiles", "", []),
    "skip_memory_metrics": ignored("always in the records", True, False),
    "local_rank": ignored("the launcher's environment decides", -1, 0),
}

# Settings that transformers had before release 5, and those of its Seq2SeqTrainingArguments.
_EARLIER: Mapping[str, OtherName] = {
    "evaluation_strategy": renamed("eval_strategy"),
    "per_gpu_train_batch_size": renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": renamed("per_device_eval_batch_size"),
    "overwrite_output_dir": ignored("a new run moves earlier checkpoints to a folder", False, True),
    "evaluate_during_training": switched("eval_strategy", "steps"),
    "no_cuda": switched("use_cpu", True),
    "adafactor": switched("optim", "adafactor"),
    "use_mps_device": _MPS,
    "tpu_num_cores": ignored("all TPU devices are used"),
    "tpu_metrics_debug": ignored("records have xla/compiles", False, True),
    "torchdynamo": options_of("torch_compile", "backend"),
    "half_precision_backend": refused(_PRECISION, "auto", "amp", "cuda_amp", "cpu_amp"),
    "fp16_backend": refused(_PRECISION, "auto", "amp", "cuda_amp"),
    "fp16_opt_level": _opt_level,
    "sharded_ddp": _FSDP,
    "fsdp_min_num_params": refused("FSDP finds the blocks that the model repeats", 0),
    "fsdp_transformer_layer_cls_to_wrap": refused("FSDP finds the blocks that the model repeats"),
    "mp_parameters": refused("model parallelism of SageMaker is not available", ""),
    "xpu_backend": refused("the device decides"),
    "use_ipex": refused("ipex is not available", False),
    "jit_mode_eval": refused("use torch_compile=True", False),
    "ray_scope": ignored("there is no search here", "last"),
    "past_index": refused("a past of the model is not passed on; keep it in the model", -1),
    "use_legacy_prediction_loop": ignored("there is one evaluation loop", False),
    "save_safetensors": refused("a pickle is never written", True),
    "include_inputs_for_metrics": refused("use include_for_metrics", False),
    "include_tokens_per_second": ignored("always in the records", False, True),
    "dispatch_batches": refused("each process reads its own samples", False),
    "split_batches": refused("use per_device_train_batch_size", False),
    "push_to_hub_token": _HUB,
    "push_to_hub_model_id": _HUB,
    "push_to_hub_organization": _HUB,
    "sortish_sampler": renamed("group_by_length"),
}

TRANSFORMERS_NAMES: Mapping[str, OtherName] = {**_EARLIER, **_CURRENT}
"""Translation of each setting of transformers that is not a field."""

_THEIRS = "or give the Trainer transformers' own TrainingArguments, which have it"


def _of_state(name: str) -> str:
    return f"use PartialState().{name} of trainer_kit.accelerator, {_THEIRS}"


_GROUPS = "training evaluate testing save logging push_to_hub optimizer lr_scheduler dataloader"

ATTRIBUTES: Mapping[str, str] = {
    **dict.fromkeys(("should_log", "should_save"), _of_state("is_main_process")),
    **dict.fromkeys(("local_process_index", "local_rank"), _of_state("local_process_index")),
    **{name: _of_state(name) for name in ("device", "process_index")},
    "world_size": _of_state("num_processes"),
    "parallel_mode": _of_state("num_processes > 1"),
    "main_process_first": _of_state("main_process_first()"),
    "distributed_state": f"use PartialState() of trainer_kit.accelerator, {_THEIRS}",
    "n_gpu": f"each process has one device, {_THEIRS}",
    "get_process_log_level": f"use getattr(logging, args.log_level.upper()), {_THEIRS}",
    **dict.fromkeys((f"set_{name}" for name in _GROUPS.split()), "give the arguments to TrainingArguments()"),
    "to_json_string": "use to_dict(), or save(path)",
    "to_sanitized_dict": "use to_dict()",
    "get_warmup_steps": "use warmup_steps and warmup_ratio",
    "train_batch_size": "use per_device_train_batch_size",
    "place_model_on_device": "the strategy places the model",
    "ddp_timeout_delta": "use Trainer(strategy=DDP(ddp_timeout=...))",
}
"""What stands for attributes of transformers' `TrainingArguments` that have a value only while a program runs."""


def is_of_transformers(args: Any) -> bool:
    """Return whether arguments are transformers' `TrainingArguments`, or of a subclass."""
    kinds = type(args).__mro__
    return any(kind.__name__ == "TrainingArguments" and kind.__module__.startswith("transformers.") for kind in kinds)


def settings_of(hf_args: Any, known: Collection[str]) -> dict[str, Any]:
    """Return the settings of a transformers `TrainingArguments` that matter, by name.

    Fields that both have are returned with any value, others if the value is not the default. Fields that a subclass of
    the user's adds are left out, see `added_by_user`.

    Args:
        hf_args: An instance of transformers' `TrainingArguments` or a subclass.
        known: Names of our fields.

    Raises:
        TypeError: If it is something else.
    """
    if not is_of_transformers(hf_args):
        raise TypeError(f"from_transformers takes transformers' TrainingArguments, but got a {type(hf_args).__name__}")
    settings = {
        field.name: getattr(hf_args, field.name)
        for field in dataclasses.fields(_class_of_transformers(hf_args))
        if field.name in known or not _is_default(field, getattr(hf_args, field.name))
    }
    if settings.get("warmup_ratio", 0) is None:  # the default, in releases of transformers 5 that still have it
        del settings["warmup_ratio"]
    return settings


_SET_BY_TRANSFORMERS = {
    "deepspeed_plugin", "distributed_state", "fsdp_plugin_args", "hf_deepspeed_config", "mixed_precision",
    "xla_fsdp_config",
}  # fmt: skip
"""Attributes of transformers' arguments that are no fields."""


def added_by_user(hf_args: Any) -> dict[str, Any]:
    """Return what a subclass or a script adds to transformers' `TrainingArguments`, for the user's own code."""
    theirs = {field.name for field in dataclasses.fields(_class_of_transformers(hf_args))} | _SET_BY_TRANSFORMERS
    names = {name for name in vars(hf_args) if not name.startswith("_")}
    names |= {field.name for field in dataclasses.fields(hf_args)}
    return {name: getattr(hf_args, name) for name in sorted(names - theirs)}


def _class_of_transformers(hf_args: Any) -> Any:
    return next(kind for kind in type(hf_args).__mro__ if kind.__module__.startswith("transformers."))


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether a field of transformers' arguments has its default, or what their `__post_init__` makes of it.

    Other arguments are not made to compare with: that would change the state that accelerate keeps for the script.
    """
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if _is_nothing(default):
        return _is_nothing(value) or (isinstance(value, dict) and not any(value.values()))
    return bool(value == default)


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)

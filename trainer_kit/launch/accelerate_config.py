"""Files of `accelerate config`, read as fields of `LaunchConfig`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_kit.utils.units import join_names

logger = logging.getLogger("trainer_kit")

_NAMES = {
    "num_processes": "num_processes",
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "rdzv_backend": "rdzv_backend",
    "mixed_precision": "mixed_precision",
    "use_cpu": "cpu",
    "dynamo_backend": "dynamo_backend",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "num_cpu_threads_per_process": "num_cpu_threads_per_process",
    "debug": "debug",
    "max_restarts": "max_restarts",
    "monitor_interval": "monitor_interval",
}
"""Fields with a counterpart."""

_SATISFIED = {
    "compute_environment", "distributed_type", "dynamo_config", "gpu_ids", "main_training_function", "quiet",
    "same_network",
}  # fmt: skip
"""Fields that are read otherwise, or whose meaning holds in any case."""

OF_FSDP = {
    "fsdp_offload_params": "give FullyShardedDataParallelPlugin(cpu_offload=True) to the Accelerator, or "
    "strategy=FSDP(offload=True) to the Trainer",
    "fsdp_activation_checkpointing": "give FullyShardedDataParallelPlugin(activation_checkpointing=True) to the "
    "Accelerator, or gradient_checkpointing=True to the Trainer",
}
"""Settings of its `fsdp_config` without which the memory may not suffice."""

_REFUSED = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}


def is_of_accelerate(values: Mapping[str, Any]) -> bool:
    """Return whether a configuration file is accelerate's."""
    return "compute_environment" in values or "distributed_type" in values


def from_accelerate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `LaunchConfig` that a configuration of accelerate sets.

    A warning names those that are given and have no effect.

    Args:
        values: Content of the file.

    Raises:
        ValueError: If the file asks for what is not available.
    """
    kind = _word(values.get("distributed_type", "NO"))
    if kind in _REFUSED:
        raise ValueError(f"distributed_type={kind!r}: {_REFUSED[kind]} is not available; use 'FSDP' for a large model")
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ValueError("compute_environment='AMAZON_SAGEMAKER' is not available; start the command on the machine")
    if str(values.get("gpu_ids") or "all") != "all":
        raise ValueError(f"gpu_ids={values['gpu_ids']!r} has no effect; set CUDA_VISIBLE_DEVICES instead")
    for name, sentence in OF_FSDP.items():
        if is_set((values.get("fsdp_config") or {}).get(name)):
            raise ValueError(f"fsdp_config: {name}={values['fsdp_config'][name]!r} is not available here; {sentence}")
    flat = {**values, **(values.get("dynamo_config") or {})}
    found = {ours: flat[theirs] for theirs, ours in _NAMES.items() if flat.get(theirs) is not None}
    if found.get("num_cpu_threads_per_process") == 0:  # accelerate then leaves the variable as it is
        del found["num_cpu_threads_per_process"]
    if "mixed_precision" in found:
        found["mixed_precision"] = _word(found["mixed_precision"]).lower()  # YAML reads an unquoted no as False
    found["fsdp"] = kind == "FSDP"
    found["tpu"] = kind in ("XLA", "TPU")
    found["cpu"] = bool(found.get("cpu")) or kind == "MULTI_CPU"
    ignored = [name for name, value in flat.items() if name not in _NAMES and name not in _SATISFIED and is_set(value)]
    if ignored:
        logger.warning("the configuration of accelerate sets %s without effect", join_names(ignored, most=None))
    return found


def is_set(value: Any) -> bool:
    """Return whether a value is more than what accelerate writes for nothing."""
    return value not in (None, False, "no", "NO", {}, [], "")


def _word(value: Any) -> str:
    return "NO" if value is False else str(value).upper()

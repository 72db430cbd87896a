"""Options of `accelerate launch` that `trainer-kit launch` does not have itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from trainer_kit.launch.accelerate_config import OF_FSDP

_SATISFIED = {
    "main_training_function": 1, "multi_gpu": 0, "no_tpu_cluster": 0, "quiet": 0, "same_network": 0,
}  # fmt: skip
"""Options whose meaning holds without them, with the number of their values."""

_IGNORED = {
    "enable_cpu_affinity": 0, "role": 1, "tee": 1, "fsdp_min_num_params": 1, "fsdp_auto_wrap_policy": 1,
    "fsdp_backward_prefetch": 1, "fsdp_state_dict_type": 1, "fsdp_forward_prefetch": 1, "fsdp_use_orig_params": 1,
    "fsdp_cpu_ram_efficient_loading": 1, "fsdp_sync_module_states": 1, "fsdp_activation_checkpointing_offload": 1,
}  # fmt: skip
"""Options without effect, which a message says."""

_PLUGIN = "give FullyShardedDataParallelPlugin({0}) to the Accelerator, or strategy=FSDP({0}) to the Trainer"
_COMPILED = "give the Accelerator TorchDynamoPlugin({0}), or the Trainer torch_compile={{...}}"
_BY_VALUE = {
    "fsdp_version": (("2",), "sharding is that of version 2; leave the option out"),
    "fsdp_sharding_strategy": (("full_shard", "1"), _PLUGIN.format("reshard_after_forward=False")),
    "fsdp_reshard_after_forward": (("true", "full_shard"), _PLUGIN.format("reshard_after_forward=False")),
    **{name: (("false",), sentence) for name, sentence in OF_FSDP.items()},
    "dynamo_mode": (("default",), _COMPILED.format("mode=")),
}
"""Options that change nothing with some of their values, and otherwise are refused with a sentence."""

_REFUSED = {
    "--fsdp shards a large model over the processes": (
        "use_deepspeed deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter "
        "deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_clipping offload_optimizer_device "
        "offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag "
        "zero3_save_16bit_model zero_stage "
        "use_megatron_lm megatron_lm_attention_backend megatron_lm_attention_dropout "
        "megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss megatron_lm_context_parallel_size "
        "megatron_lm_decoder_last_pipeline_num_layers megatron_lm_eod_mask_loss megatron_lm_expert_model_parallel_size "
        "megatron_lm_expert_tensor_parallel_size megatron_lm_gradient_clipping megatron_lm_hidden_dropout "
        "megatron_lm_no_load_optim megatron_lm_no_save_optim megatron_lm_num_micro_batches "
        "megatron_lm_optimizer_cpu_offload megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_pp_degree "
        "megatron_lm_recompute_activations megatron_lm_recompute_granularity megatron_lm_recompute_method "
        "megatron_lm_recompute_num_layers megatron_lm_sequence_parallelism megatron_lm_tp_degree "
        "megatron_lm_use_custom_fsdp megatron_lm_use_distributed_optimizer megatron_lm_use_precision_aware_optimizer "
        "megatron_lm_use_rotary_position_embeddings "
        "use_parallelism_config parallelism_config_cp_backend parallelism_config_cp_comm_strategy "
        "parallelism_config_cp_size parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
        "parallelism_config_sp_attn_implementation parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_size parallelism_config_tp_size"
    ),
    "--mixed-precision fp8 uses torchao's recipe, which has no options": (
        "fp8_amax_compute_algo fp8_amax_history_len fp8_backend fp8_enable_fsdp_float8_all_gather fp8_format "
        "fp8_interval fp8_margin fp8_opt_level fp8_override_linear_precision fp8_pad_inner_dim "
        "fp8_use_autocast_during_eval"
    ),
    "start the command on the machine": "aws_access_key_id aws_secret_access_key",
    "start the script by mpirun itself, as `mpirun -np 8 python train.py`, whose variables are read": "mpirun_hostfile",
    "start the same command with --tpu on each host of a pod, as gcloud's `--worker=all --command` does": (
        "env tpu_cluster tpu_use_sudo vm"
    ),
    "give Accelerator(downcast_bf16=True), or Trainer(strategy=XLA(downcast_bf16=True))": "downcast_bf16",
    "start the program from a Python script, since only scripts and modules are started": "no_python",
    _PLUGIN.format("transformer_cls_names_to_wrap=[...]"): "fsdp_transformer_layer_cls_to_wrap",
    _COMPILED.format("fullgraph=True"): "dynamo_use_fullgraph",
    _COMPILED.format("dynamic=True"): "dynamo_use_dynamic",
    _COMPILED.format("use_regional_compilation=True"): "dynamo_use_regional_compilation",
}


def add_accelerate_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `accelerate launch`, with dashes and with underscores, hidden from the help."""

    def add(name: str, *shorts: str, **settings: Any) -> None:
        spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}", *shorts])
        parser.add_argument(*spellings, help=argparse.SUPPRESS, **settings)

    for name, values in _SATISFIED.items():
        kind: dict[str, Any] = {} if values else {"action": "store_true"}
        add(name, *(["-q"] if name == "quiet" else []), dest="_satisfied", **kind)
    for name, values in _IGNORED.items():
        add(name, *(["-t"] if name == "tee" else []), action=_Ignore, nargs=values or 0, dest="_ignored")
    for name, (harmless, sentence) in _BY_VALUE.items():
        add(name, type=_harmless(harmless, sentence), dest="_ignored", default=argparse.SUPPRESS)
    for sentence, names in _REFUSED.items():
        for name in names.split():
            add(name, action=_Refuse, nargs="?", const=sentence, dest="_ignored")


def say(sentence: str) -> None:
    """Print a sentence of the launcher on standard error."""
    print(f"trainer-kit launch: {sentence}", file=sys.stderr, flush=True)


def _harmless(values: tuple[str, ...], sentence: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text.lower() not in values:
            raise argparse.ArgumentTypeError(f"{text} is not available here; {sentence}")
        return text

    return check


class _Refuse(argparse.Action):
    """An option for which there is nothing here."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        parser.error(f"{args[-1]} is not available; {self.const}")


class _Ignore(argparse.Action):
    """An option that has no effect here."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        say(f"{args[-1]} has no effect")

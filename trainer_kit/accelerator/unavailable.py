"""Names of accelerate for which there is nothing here: scripts can import them, and a use is refused in a sentence.

Attributes of its objects without a counterpart are listed here too; a script that reads one gets a sentence.
"""

from __future__ import annotations

from typing import Any

_SHARD = "shard the model with FullyShardedDataParallelPlugin()"
_NO_DEEPSPEED = f"DeepSpeed is not available; {_SHARD}"
_FSDP_FILES = "save_state() and save_model() gather a sharded model; load_state() divides it again"
_COMPILING = "a prepared model is compiled by TorchDynamoPlugin(use_regional_compilation=True)"
_LOADERS = "prepare() divides the batches, and skip_first_batches(loader, n) skips some"
_DETAIL = "it is a detail of accelerate's own code; leave it out"
_BY_REASON = {
    _NO_DEEPSPEED: (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper "
        "DeepSpeedSequenceParallelConfig DummyOptim DummyScheduler GatheredParameters HfDeepSpeedConfig "
        "compile_regions_deepspeed deepspeed_required get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed "
        "prepare_deepspeed_cmd_env"
    ),
    f"Megatron-LM is not available; {_SHARD}": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronEngine "
        "MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMPlugin "
        "MegatronLMSchedulerWrapper T5TrainStep add_model_config_to_megatron_parser "
        "avg_losses_across_data_parallel_group finish_mpu_init gather_across_data_parallel_groups initialize "
        "model_provider_func parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config "
        "parse_t5_config prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler"
    ),
    "tensor, context and sequence parallelism are not available; use FullyShardedDataParallelPlugin()": (
        "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin "
        "get_model_tp_size prepare_extend_env_parallelism_config"
    ),
    "mixed_precision='fp8' uses torchao's recipe, which has no options; leave the object out": (
        "AmaxComputeAlgorithm Backend FP8BackendType FP8Format FP8RecipeKwargs MSAMPRecipeKwargs OptLevel "
        "TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao "
        "filter_first_and_last_linear_layers filter_linear_layers find_first_last_linear_layers has_ao_layers "
        "has_transformer_engine_layers setup_fp8_env torchao_required"
    ),
    "a model must fit on its devices; shard it with FullyShardedDataParallelPlugin()": (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook OffloadedWeightsLoader PrefixedDataset UserCpuOffloadHook "
        "align_module_device attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook "
        "attach_layerwise_casting_hooks calculate_maximum_sizes check_device_same check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_device_map compute_module_total_buffer_size cpu_offload "
        "cpu_offload_with_hook disk_offload dispatch_model extract_submodules_state_dict fallback_allocate "
        "get_balanced_memory get_max_layer_size get_module_leaves get_module_size_with_ties "
        "get_state_dict_from_offload get_state_dict_offloaded_model infer_auto_device_map load_offloaded_weight "
        "load_offloaded_weights offload_state_dict offload_weight save_offload_index"
    ),
    "quantized loading is not available; load the model with transformers' own arguments": (
        "BnbQuantizationConfig get_keys_to_not_convert get_parameter_device get_quantized_model_device_map "
        "has_4bit_bnb_layers load_and_quantize_model quantize_and_offload_8bit replace_with_bnb_layers"
    ),
    "pipelines are not available; shard the model with FullyShardedDataParallelPlugin()": (
        "build_pipeline find_pippy_batch_size generate_device_map ignorant_find_batch_size pad_input_tensors "
        "pippy_forward prepare_pippy"
    ),
    f"it is not available; {_FSDP_FILES}": (
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac "
        "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_parameters_from_modules load_fsdp_model "
        "load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    f"it is not available; {_COMPILING}": (
        "compile_regions compile_regions_fsdp2 has_compiled_regions has_repeated_blocks is_repeated_blocks"
    ),
    f"it is not available; {_LOADERS}": (
        "BatchSamplerShard DataLoaderAdapter DataLoaderStateMixin IterableDatasetShard SkipBatchSampler SkipDataLoader "
        "get_sampler"
    ),
    "it is not available; give the module a hook of torch (register_forward_pre_hook, register_forward_hook)": (
        "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules"
    ),
    "it is not available; use save_state(), load_state() and register_for_checkpointing()": (
        "TORCH_SAFE_GLOBALS is_weights_only_available load_accelerator_state load_custom_state save_accelerator_state "
        "save_custom_state"
    ),
    "debug_launcher() is not available; use notebook_launcher(function, num_processes=2)": "debug_launcher",
    "it is not available; run `trainer-kit launch`, or `trainer-kit test` to try the machine": (
        "env_var_path_add prepare_multi_gpu_env prepare_simple_launcher_cmd_env prepare_tpu test_launch "
        "TORCH_LAUNCH_PARAMS DEEPSPEED_MULTINODE_LAUNCHERS"
    ),
    "SageMaker is not available; start `trainer-kit launch` on the machine": (
        "SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION "
        "SAGEMAKER_TRANSFORMERS_VERSION SageMakerConfig SageMakerDistributedType prepare_sagemager_args_inputs"
    ),
    "it is not available; Accelerator(mixed_precision=) decides, and accelerator.autocast() enters it": (
        "get_grad_scaler get_mixed_precision_context_manager"
    ),
    "processes are not bound to a part of the machine; use numactl": "override_numa_affinity set_numa_affinity",
    f"it is not available; {_DETAIL}": (
        "CUDA_DISTRIBUTED_TYPES CannotPadNestedTensorWarning CustomDtype EnumWithContains SharedDict "
        "TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TORCH_DISTRIBUTED_OPERATION_TYPES ThreadLocalSharedDict USE_TORCH_XLA "
        "chained_operation check_cuda_p2p_ib_support check_os_kernel do_nothing gather_tensor_shape get_driver_version "
        "get_module_class_from_name install_xla is_amdsmi_available is_bitsandbytes_multi_backend_available "
        "is_import_timer_available is_torch_xpu_tensor model_has_dtensor move_to_device np_core patch_optimizer_step "
        "purge_accelerate_environment verify_operation"
    ),
}
_PARALLELISM = (
    "tensor, context, pipeline and sequence parallelism are not available; process_index is the rank of the data"
)
_IN_STEP = "use accelerator.gradient_state"
_MEMBERS_BY_REASON = {
    "Accelerator": {
        _PARALLELISM: (
            "context_parallel_rank data_parallel_rank data_parallel_shard_rank deepspeed_ulysses_dl_adapter "
            "maybe_context_parallel pipeline_parallel_rank tensor_parallel_rank"
        ),
        "mixed_precision='fp8' uses torchao's recipe, which has no options; leave it out": (
            "ao_recipe_handler delayed_fp8_autocast has_fp8_handler msamp_recipe_handler te_recipe_handler"
        ),
        "use mixed_precision == 'fp8'": "fp8_enabled",
        "earlier releases of accelerate had it; use mixed_precision == 'fp16'": "use_fp16",
        "LOMO is not available; use an optimizer of torch and backward(loss)": "lomo_backward",
        "a model is on one device, or sharded; leave the check out": "verify_device_map",
        "count the batches in the loop": "step",
        "use set_trigger() and check_trigger()": "flag_tensor",
    },
    "PartialState": {
        "use device": "default_device",
        "the device is set when the state is made; leave the call out": "set_device",
        _DETAIL: "fork_launched",
    },
    "AcceleratorState": {
        _COMPILING: "dynamo_plugin",
        _NO_DEEPSPEED: "get_deepspeed_plugin select_deepspeed_plugin",
    },
    "DataLoader": {
        "its batches are on accelerator.device": "device",
        "count the epochs in the loop, and give each to set_epoch()": "iteration",
        _IN_STEP: "gradient_state",
        "the attribute `loader` is the DataLoader that was prepared": "base_dataloader",
        "the processes agree on the order of samples without it; leave it out": "rng_types synchronized_generator",
        "use accelerator.skip_first_batches(loader, n)": "skip_batches",
        "use accelerator.use_stateful_dataloader": "use_stateful_dataloader",
    },
    "optimizer": {
        "use accelerator.state": "accelerator_state",
        _IN_STEP: "gradient_state",
        "use accelerator.scaler": "scaler",
        "it is the argument of Accelerator(device_placement=)": "device_placement",
    },
    "scheduler": {
        _IN_STEP: "gradient_state",
        "use accelerator.split_batches": "split_batches",
        "print get_last_lr()": "print_lr",
        "it is the argument of Accelerator(step_scheduler_with_optimizer=)": "step_with_optimizer",
    },
}  # fmt: skip


def _by_name(by_reason: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names.split()}


_REASONS = _by_name(_BY_REASON)
_MEMBERS = {kind: _by_name(by_reason) for kind, by_reason in _MEMBERS_BY_REASON.items()}


def refusing(name: str, reason: str) -> Any:
    """Return a class that raises ValueError with the reason when it is called; it has no instances."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{name}: {reason}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not available: {reason}."})


def no_member(owner: object, name: str, *kinds: str) -> AttributeError:
    """Return the error for a missing attribute; where accelerate's kinds of objects have it, it says what to do."""
    todo = next((f": {_MEMBERS[kind][name]}" for kind in kinds if name in _MEMBERS.get(kind, ())), "")
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{todo}", name=name, obj=owner)


def member(inner: object, kind: str, name: str) -> Any:
    """Return an attribute of the object that was prepared.

    Raises:
        AttributeError: If it has none.
    """
    try:
        return getattr(inner, name)
    except AttributeError:
        if name not in _MEMBERS[kind]:
            raise
    raise no_member(inner, name, kind)


def __getattr__(name: str) -> Any:
    if name not in _REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = refusing(name, _REASONS[name])  # one class, so that isinstance() works
    return found


__all__ = sorted(_REASONS)

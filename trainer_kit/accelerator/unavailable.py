"""Names of accelerate for which there is nothing here: scripts can import them, and a use is refused in a sentence."""

from __future__ import annotations

from typing import Any

_DEEPSPEED = "DeepSpeed is not available; shard the model with FullyShardedDataParallelPlugin()"
_MEGATRON = "Megatron-LM is not available; shard the model with FullyShardedDataParallelPlugin()"
_PARALLELISM = "tensor, context and sequence parallelism are not available; use FullyShardedDataParallelPlugin()"
_FP8 = "mixed_precision='fp8' uses torchao's recipe, which has no options; leave the object out"
_OFFLOADING = "a model must fit on its devices; shard it with FullyShardedDataParallelPlugin()"
_REASONS = {
    "AbstractTrainStep": _MEGATRON,
    "BertTrainStep": _MEGATRON,
    "BnbQuantizationConfig": "quantized loading is not available; load the model with transformers' own arguments",
    "DeepSpeedEngineWrapper": _DEEPSPEED,
    "DeepSpeedOptimizerWrapper": _DEEPSPEED,
    "DeepSpeedPlugin": _DEEPSPEED,
    "DeepSpeedSchedulerWrapper": _DEEPSPEED,
    "DeepSpeedSequenceParallelConfig": _DEEPSPEED,
    "DummyOptim": _DEEPSPEED,
    "DummyScheduler": _DEEPSPEED,
    "FP8RecipeKwargs": _FP8,
    "GPTTrainStep": _MEGATRON,
    "HfDeepSpeedConfig": _DEEPSPEED,
    "MSAMPRecipeKwargs": _FP8,
    "MegatronEngine": _MEGATRON,
    "MegatronLMDummyDataLoader": _MEGATRON,
    "MegatronLMDummyScheduler": _MEGATRON,
    "MegatronLMOptimizerWrapper": _MEGATRON,
    "MegatronLMPlugin": _MEGATRON,
    "MegatronLMSchedulerWrapper": _MEGATRON,
    "ParallelismConfig": _PARALLELISM,
    "T5TrainStep": _MEGATRON,
    "TERecipeKwargs": _FP8,
    "TorchContextParallelConfig": _PARALLELISM,
    "TorchTensorParallelConfig": _PARALLELISM,
    "TorchTensorParallelPlugin": _PARALLELISM,
    "avg_losses_across_data_parallel_group": _MEGATRON,
    "cpu_offload": _OFFLOADING,
    "cpu_offload_with_hook": _OFFLOADING,
    "debug_launcher": "debug_launcher() is not available; use notebook_launcher(function, num_processes=2)",
    "disk_offload": _OFFLOADING,
    "dispatch_model": _OFFLOADING,
    "get_active_deepspeed_plugin": _DEEPSPEED,
    "infer_auto_device_map": _OFFLOADING,
    "load_and_quantize_model": "quantized loading is not available; load the model with transformers' own arguments",
    "map_pytorch_optim_to_deepspeed": _DEEPSPEED,
    "prepare_pippy": "pipelines are not available; shard the model with FullyShardedDataParallelPlugin()",
}


def __getattr__(name: str) -> Any:
    if name not in _REASONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{name}: {_REASONS[name]}")

    refusing = type(name, (), {"__init__": refuse, "__doc__": f"Not available: {_REASONS[name]}."})
    globals()[name] = refusing  # one class, so that isinstance() works
    return refusing


__all__ = sorted(_REASONS)

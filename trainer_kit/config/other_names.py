"""Names that other trainers have for the fields of `TrainingArguments`."""

from __future__ import annotations

# Other trainers' names of fields, if they are not similar in spelling.
SYNONYMS = {
    "fp16": "mixed_precision",
    "bf16": "mixed_precision",
    "no_cuda": "use_cpu",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
}
_SHARDED = "use strategy='fsdp', or Trainer(strategy=FSDP(...)) for its options"
# What to do instead of giving other trainers' fields that are no fields here.
REMEDIES = {
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "use_liger_kernel": "use chunked_cross_entropy=True, which needs no other package",
    "tf32": "use float32_matmul_precision='high' for tf32=True, 'highest' for False",
    "ddp_find_unused_parameters": "use Trainer(strategy=DDP(find_unused_parameters=...))",
    "ddp_bucket_cap_mb": "use Trainer(strategy=DDP(bucket_cap_mb=...))",
    "ddp_timeout": "use Trainer(strategy=DDP(ddp_timeout=...))",
    "ddp_backend": "the device decides: gloo on CPUs, nccl on NVIDIA GPUs",
    "torch_compile_backend": "use torch_compile={'backend': ...}",
    "torch_compile_mode": "use torch_compile={'mode': ...}",
    "gradient_checkpointing_kwargs": "checkpointing is never reentrant; use gradient_checkpointing={'policy': ...}",
    "eval_accumulation_steps": "predictions always leave the device after each batch",
    "ddp_broadcast_buffers": "buffers are always broadcast, after each step",
}

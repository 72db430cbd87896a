from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer_kit.config.arguments import TrainingArguments


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("learing_rate", "learning_rate"),
        ("lr", "learning_rate"),
        ("evaluation_strategy", "eval_strategy"),
        ("batch_size", "per_device_train_batch_size"),
        ("bf16", "mixed_precision"),
        ("fp16", "mixed_precision"),
        ("no_cuda", "use_cpu"),
        ("warmup_step", "warmup_steps"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(unknown: str, nearest: str) -> None:
    message = f"^TrainingArguments has no field '{unknown}'; the nearest known name is '{nearest}'$"
    settings: dict[str, Any] = {unknown: 1}
    with pytest.raises(TypeError, match=message):
        TrainingArguments(**settings)
    with pytest.raises(TypeError, match=message):
        TrainingArguments.from_dict(settings)
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(TrainingArguments(), **settings)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fsdp", "use strategy='fsdp', or Trainer(strategy=FSDP(...)) for its options"),
        ("fsdp_config", "use strategy='fsdp', or Trainer(strategy=FSDP(...)) for its options"),
        ("ddp_timeout", "use Trainer(strategy=DDP(ddp_timeout=...))"),
        ("torch_compile_backend", "use torch_compile={'backend': ...}"),
        ("torch_compile_mode", "use torch_compile={'mode': ...}"),
        (
            "gradient_checkpointing_kwargs",
            "checkpointing is never reentrant; use gradient_checkpointing={'policy': ...}",
        ),
        ("use_liger_kernel", "use chunked_cross_entropy=True, which needs no other package"),
        ("tf32", "use float32_matmul_precision='high' for tf32=True, 'highest' for False"),
    ],
)
def test_a_name_of_transformers_is_refused_with_what_stands_for_it(name: str, remedy: str) -> None:
    for make in (lambda settings: TrainingArguments(**settings), TrainingArguments.from_dict):
        with pytest.raises(TypeError) as raised:
            make({name: 1})
        assert str(raised.value) == f"TrainingArguments has no field {name!r}; {remedy}"

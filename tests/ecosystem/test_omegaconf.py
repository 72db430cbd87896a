"""Arguments from OmegaConf's configurations, which Hydra gives."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit import TrainingArguments

omegaconf = pytest.importorskip("omegaconf")
pytestmark = pytest.mark.ecosystem


def test_a_configuration_gives_the_arguments() -> None:
    text = (
        "learning_rate: 3e-4\nmax_epochs: 2\nbf16: true\nreport_to: [jsonl]\npad_to_lengths: [64, 128]\n"
        "gradient_checkpointing: {modules: ['layers.*'], every: 2}\nlr_scheduler_kwargs: {num_cycles: 2}\n"
        "lr_scheduler_type: cosine\n"
    )
    args = TrainingArguments(**omegaconf.OmegaConf.create(text))
    assert args == TrainingArguments(
        learning_rate=3e-4, num_train_epochs=2, mixed_precision="bf16", report_to=["jsonl"], pad_to_lengths=[64, 128],
        gradient_checkpointing={"modules": ["layers.*"], "every": 2}, lr_scheduler_kwargs={"num_cycles": 2},
        lr_scheduler_type="cosine",
    )  # fmt: skip
    checkpointing: Any = args.gradient_checkpointing
    assert type(checkpointing["modules"]) is list


def test_a_structured_configuration() -> None:
    config = omegaconf.OmegaConf.structured(TrainingArguments)
    given = omegaconf.OmegaConf.from_dotlist(
        ["learning_rate=3e-4", "warmup_steps=0.1", "eval_strategy=steps", "eval_steps=0.5", "max_shard_size=2GB"]
    )
    merged = omegaconf.OmegaConf.merge(config, given)
    expected = TrainingArguments(
        learning_rate=3e-4, warmup_ratio=0.1, eval_strategy="steps", eval_steps=0.5, max_shard_size="2GB"
    )
    assert TrainingArguments(**merged) == expected
    assert omegaconf.OmegaConf.to_object(merged) == expected
    with pytest.raises(omegaconf.errors.ConfigKeyError, match="learing_rate"):
        omegaconf.OmegaConf.merge(config, {"learing_rate": 1.0})
    with pytest.raises(omegaconf.errors.ValidationError, match="learning_rate"):
        omegaconf.OmegaConf.merge(config, {"learning_rate": "high"})

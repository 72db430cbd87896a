"""Learning rates by layer, of models of several architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer
from trainer_kit.optim import make_optimizer, make_scheduler

SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=11, **SIZES))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=11, num_key_value_heads=2, tie_word_embeddings=False, **SIZES)
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SIZES))


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "muon"])
@pytest.mark.parametrize(
    ("make", "block", "below", "above"),
    [
        (bert, "bert.encoder.layer.", ["bert.embeddings"], ["bert.pooler", "classifier"]),
        (llama, "model.layers.", ["model.embed_tokens"], ["model.norm", "lm_head"]),
        (vit, ".layer", ["vit.embeddings"], ["vit.layernorm", "classifier"]),
    ],
)
def test_each_layer_has_its_rate(make: Any, block: str, below: list[str], above: list[str], optim: str) -> None:
    model = make()
    args = arguments(Path(), layer_lr_decay=0.5, learning_rate=0.8, weight_decay=0.1, optim=optim)
    optimizer = make_optimizer(model, args)
    found = rates(optimizer)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    expected = {**dict.fromkeys(below, 0.05), **dict.fromkeys(above, 0.8)}
    for name, rate in found.items():
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        outside = [value for prefix, value in expected.items() if name.startswith(prefix)]
        assert rate == pytest.approx(outside[0] if outside else 0.1 * 2 ** (number or 0)), name
    assert any(block in name for name in found)


def test_the_schedule_keeps_the_ratios_and_begins_at_the_head() -> None:
    args = arguments(
        Path(), layer_lr_decay=0.5, learning_rate=0.8, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 0.08},
    )  # fmt: skip
    optimizer = make_optimizer(bert(), args)
    scheduler = make_scheduler(optimizer, args, 10)
    assert optimizer.param_groups[0]["lr"] == 0.8
    scheduler.go_on_at(10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.08 * 0.5**n for n in range(5)])


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "muon", "adafactor"])
def test_a_floor_is_that_of_the_head_also_where_it_is_frozen(optim: str) -> None:
    args = arguments(
        Path(), layer_lr_decay=0.5, learning_rate=0.8, optim=optim, lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": 0.4},
    )  # fmt: skip
    model = bert()
    for head in (model.classifier, model.bert.pooler):
        head.requires_grad_(False)
    optimizer = make_optimizer(model, args)
    peaks = [group["lr"] for group in optimizer.param_groups]
    assert max(peaks) == 0.4
    make_scheduler(optimizer, args, 10).go_on_at(10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([peak / 2 for peak in peaks])


def test_a_resume_is_exact(tmp_path: Path) -> None:
    samples = [{"input_ids": torch.arange(5) + n % 5, "labels": torch.tensor(n % 2)} for n in range(16)]

    def train(folder: Path, resume: Any = None) -> Trainer:
        torch.manual_seed(0)
        args = arguments(folder, layer_lr_decay=0.5, save_strategy="steps", save_steps=2, per_device_train_batch_size=4)
        trainer = Trainer(bert(), args, samples)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "other", str(tmp_path / "whole" / "run" / "checkpoint-2"))
    for one, other in zip(whole.run.model.parameters(), resumed.run.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer_lr_decay=0\.5 needs a model that repeats .* Linear repeats none"):
        make_optimizer(nn.Linear(2, 2), arguments(Path(), layer_lr_decay=0.5))

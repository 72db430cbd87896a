"""Tensor parallelism: the gradients of one process, whatever the layout; plans that are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.architectures import ARCHITECTURES, VOCABULARY, llama, mistral, qwen3
from kit.ranks import on_ranks
from kit.split_training import train_tower
from kit.token_training import Gradients, whole

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.fsdp.tensor_parallel import check_plan, find_places

LAYOUTS: dict[str, dict[str, int]] = {
    "tensor 2": {"tensor": 2},
    "tensor 2 x shard 2": {"shard": 2, "tensor": 2},
    "tensor 2 x replicate 2": {"replicate": 2, "tensor": 2},
}
QUICK = [("llama-tied", "tensor 2"), ("qwen3", "tensor 2 x shard 2")]
MODELS = {
    "llama": lambda: llama(num_key_value_heads=2),
    "llama-tied": lambda: llama(num_key_value_heads=2, tie_word_embeddings=True),
    "llama-bias": lambda: llama(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: qwen3(num_attention_heads=4, num_key_value_heads=2),
    "mistral": lambda: mistral(num_key_value_heads=2),
}


class Adapted(torch.nn.Module):
    """Holds a model under another name and passes its attributes on, as models with adapters do."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


REFUSED = {
    **ARCHITECTURES, **MODELS,
    "llama-one": llama,
    "llama-three": lambda: llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24),
    "llama-odd": lambda: llama(num_key_value_heads=2, vocab_size=31),
    "llama-narrow": lambda: llama(num_key_value_heads=2, intermediate_size=33),
    "adapted": lambda: Adapted(llama(num_key_value_heads=2)),
}  # fmt: skip


def texts() -> list[dict[str, torch.Tensor]]:
    """Texts of which some count for nothing, in a number that leaves a reader without samples."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, VOCABULARY, (8,), generator=generator) for _ in range(13)]
    return [
        {"input_ids": row, "labels": row.where(torch.arange(8) < 8 - index % 5, -100)} for index, row in enumerate(rows)
    ]


def train(folder: str, name: str, batch_size: int, layout: str | None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, gradients = MODELS[name](), Gradients()
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", save_strategy="no",
        num_train_epochs=1, per_device_train_batch_size=batch_size, gradient_accumulation_steps=2, optim="sgd",
        learning_rate=0.1, max_grad_norm=0.5, logging_steps=1, **options,
    )  # fmt: skip
    strategy = None if layout is None else FSDP(device="cpu", mesh=LAYOUTS[layout], tensor_parallel="auto")
    trainer = Trainer(model, args, texts(), texts()[:5], callbacks=[gradients], strategy=strategy)
    output, state = trainer.train(), trainer.run.state
    return {
        "gradients": gradients.seen, "loss": output.training_loss, "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": {key: whole(each).detach().clone() for key, each in trainer.run.model.state_dict().items()},
        "counts": (state.step, state.samples, state.tokens), "norm": float(trainer.run.last_norms.total),
        "predictions": trainer.predict(texts()[:5]).predictions,
    }  # fmt: skip


def settled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights but the biases of keys: attention ignores them, so that their gradients are rounding errors.

    Adam divides these by their own size, and takes steps of any length with them.
    """
    return {name: weight for name, weight in weights.items() if not name.endswith("key.bias")}


def check(ours: dict[str, Any], alone: dict[str, Any], tolerance: float) -> None:
    assert ours["counts"] == alone["counts"]
    assert len(ours["gradients"]) == len(alone["gradients"]) > 0
    for own, other in zip(ours["gradients"], alone["gradients"], strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance)
    for name in ("loss", "eval_loss", "norm"):
        assert ours[name] == pytest.approx(alone[name], abs=tolerance)
    torch.testing.assert_close(*map(settled, (ours["weights"], alone["weights"])), rtol=0, atol=tolerance)
    own, other = ours["predictions"], alone["predictions"]
    shown = (own != -100) & (other != -100)  # the padding is that of a batch
    np.testing.assert_allclose(own[shown], other[shown], rtol=0, atol=10 * tolerance)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow)
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_gradients_are_those_of_one_process(tmp_path: Path, name: str, layout: str) -> None:
    readers = math.prod(LAYOUTS[layout].values()) // 2
    alone = train(str(tmp_path), name, 4, None)
    for ours in on_ranks(2 * readers, train, str(tmp_path), name, 4 // readers, layout):
        check(ours, alone, 1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [{}, {"frozen": ("blocks.0.*",)}, {"reduce_each_batch": False, "reshard_after_forward": False}],
    ids=str,
)
@pytest.mark.parametrize("layout", ["tensor 2", pytest.param("tensor 2 x shard 2", marks=pytest.mark.slow)])
def test_a_plan_of_ones_own_changes_no_number(tmp_path: Path, options: dict[str, Any], layout: str) -> None:
    readers = math.prod(LAYOUTS[layout].values()) // 2
    alone = train_tower(str(tmp_path), 4, None, frozen=options.get("frozen", ()))
    for ours in on_ranks(2 * readers, train_tower, str(tmp_path), 4 // readers, LAYOUTS[layout], **options):
        check(ours, alone, 1e-12)
        torch.testing.assert_close(ours["averages"], alone["averages"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "plan", "text"),
    [
        ("llama-one", "auto", "num_key_value_heads=1 of LlamaForCausalLM must be divisible by it"),
        ("llama-three", "auto", "num_attention_heads=3 of LlamaForCausalLM must be divisible by it"),
        (
            "llama-odd",
            {"lm_head": "colwise_gather_output"},
            "'lm_head' has out_features=31, which 2 processes on the axis 'tensor' cannot divide",
        ),
        ("llama-narrow", "auto", "'model.layers.0.mlp.gate_proj' has out_features=33"),
        ("llama-tied", {"lm_head": "colwise_gather_output"}, "'lm_head' has a tied weight, which cannot be split"),
        ("llama", {"model.embed_tokens": "rowwise"}, "is a Embedding; only nn.Linear can be rowwise"),
        ("llama", {"model.blocks.*": "rowwise"}, "'model.blocks.*' matches no module of LlamaForCausalLM"),
        ("gpt2", "auto", "GPT2LMHeadModel has no plan"),
        ("adapted", "auto", "the plan of Adapted matches none of its modules, as in a model with adapters; use"),
        ("gpt2", {"*.mlp.c_fc": "colwise"}, "is a Conv1D; only nn.Linear can be colwise"),
        ("t5", "auto", "T5ForConditionalGeneration has no plan"),
        ("mixtral", "auto", "has the style 'packed_colwise' for 'model.layers.*.mlp.experts.gate_up_proj'"),
    ],
)
def test_plans_that_do_not_fit(name: str, plan: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        find_places(REFUSED[name](), plan, 2)


@pytest.mark.parametrize(
    ("plan", "size", "error", "text"),
    [
        (None, 2, ValueError, "which needs a plan"),
        ("own", 2, TypeError, "tensor_parallel='own' must be 'auto', None, or styles"),
        ({"a": "sequence_parallel"}, 2, ValueError, "'a' has the style 'sequence_parallel', which is not known"),
        ("auto", 1, ValueError, "needs the axis 'tensor' in mesh"),
    ],
)
def test_arguments_that_do_not_fit(plan: Any, size: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_plan(plan, size)


def test_tied_modules_and_embeddings_of_a_models_own_plan_stay_whole() -> None:
    names = [place.name for place in find_places(MODELS["llama-tied"](), "auto", 2)]
    assert len(names) == 14
    assert not {"lm_head", "model.embed_tokens"} & {*names}

"""Muon with AdamW takes the steps of torch's own two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.models import Embedded
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer
from trainer_kit.optim import make_optimizer, make_scheduler


def gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(50, (12,), generator=generator) for _ in range(32)]
    return [{"input_ids": each, "labels": each} for each in ids]


def by_hand(steps: int) -> nn.Module:
    """Train GPT-2 with two optimizers of torch and a linear schedule."""
    model = gpt2()
    named = dict(model.named_parameters())
    hidden = [each for name, each in named.items() if each.ndim == 2 and name.startswith("transformer.h.")]
    tables = [named["transformer.wte.weight"], named["transformer.wpe.weight"]]
    others = [each for each in named.values() if each.ndim < 2]
    assert len(hidden) + len(tables) + len(others) == len(named)
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.9, ns_steps=4, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01, fused=True
    )
    data = texts()
    for step in range(steps):
        for group in muon.param_groups + adamw.param_groups:
            group["lr"] = 0.01 * (1 - step / steps)
        batch = {name: torch.stack([each[name] for each in data[4 * step : 4 * step + 4]]) for name in data[0]}
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        model.zero_grad()
    return model


class InOrder(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter(texts())


def test_a_transformers_model_trains_as_by_hand(tmp_path: Path) -> None:
    trainer = Trainer(
        gpt2(),
        arguments(tmp_path, optim="muon", optim_args="momentum=0.9,ns_steps=4", learning_rate=0.01, weight_decay=0.1,
                  per_device_train_batch_size=4, max_steps=8),
        InOrder(),
    )  # fmt: skip
    trainer.train()
    theirs = dict(by_hand(8).named_parameters())
    for name, own in trainer.run.model.named_parameters():
        torch.testing.assert_close(own, theirs[name], rtol=0, atol=0)
    for name, own in gpt2().named_parameters():
        assert not torch.equal(own, theirs[name])


def optimizer_of(model: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    return make_optimizer(model, arguments(Path(), optim="muon", learning_rate=0.1, weight_decay=0.5, **changes))


def test_groups_have_the_schedules_rate_and_the_decay_of_other_optimizers() -> None:
    optimizer = optimizer_of(Embedded(), optim_args="nesterov=false")
    assert [(group["weight_decay"], group.get("nesterov")) for group in optimizer.param_groups] == [
        (0.5, False), (0.5, None), (0.0, None),
    ]  # fmt: skip
    assert optimizer.param_groups[0]["param_names"] == ["first.weight"]
    make_scheduler(optimizer, arguments(Path(), warmup_steps=2), 10, place=1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05, 0.05]


def steps(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_copies_and_added_groups_step_on_their_own() -> None:
    model = Embedded()
    optimizer = optimizer_of(model)
    steps(optimizer, model.parameters(), 0)
    other, model_copy = copy.deepcopy((optimizer, model))
    steps(other, model_copy.parameters(), 1)
    before = [each.clone() for each in model.parameters()]
    assert all(not torch.equal(one, two) for one, two in zip(before, model_copy.parameters(), strict=True))
    extra = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [("extra", extra)]})
    assert len(optimizer.param_groups) == 4
    steps(optimizer, [*model.parameters(), extra], 1)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), model_copy.parameters(), strict=True))
    assert not torch.equal(extra.detach(), torch.ones(2, 2))


def test_hooks_run_once_a_step_and_a_closure_is_called() -> None:
    model, seen = Embedded(), []
    torch.optim.AdamW(model.parameters())
    torch.optim.Muon([model.first.weight])  # from now on torch's own steps call hooks
    optimizer = optimizer_of(model)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    steps(optimizer, model.parameters(), 0)
    assert seen == [1]
    assert optimizer.step(lambda: 3.0) == 3.0  # type: ignore[func-returns-value]


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="optim='muon' trains matrices of hidden layers, and Linear has none"):
        optimizer_of(nn.Linear(2, 2))


def test_frozen_others_leave_muon_alone() -> None:
    model = Embedded().requires_grad_(False)
    model.first.weight.requires_grad_(True)
    (group,) = optimizer_of(model).param_groups
    assert group["params"] == [model.first.weight]

"""Splits that would change a number are refused on all processes; regions in which a split begins and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from kit.split_training import (
    PLAN,
    Attention,
    ByMethod,
    Dropped,
    Late,
    Normed,
    OneHead,
    RightByMethod,
    Scaled,
    Small,
    Tower,
    Viewed,
    Zero,
    train_tower,
)  # fmt: skip
from kit.token_training import padded, texts
from torch import nn

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.strategies.fsdp.same_outputs import find_regions
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.fsdp.tensor_parallel import Place

WITHOUT_NORM = {name: style for name, style in PLAN.items() if name != "blocks.*.norm"}
MLP = {"blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise"}
INNER_MLP = {"blocks.*.mlp.wide": "colwise", "blocks.*.mlp.narrow": "rowwise"}
DIFFERS = "'blocks.0' computes other numbers if its modules are split"
BF16 = {"mixed_precision": "bf16", "learning_rate": 0.05}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plan": WITHOUT_NORM}, "the gradient of 'blocks.0.norm.weight' differs between processes"),
        ({"plan": MLP, "block": Scaled}, "the gradient of 'blocks.0.scale' differs between processes"),
        ({"plan": MLP, "block": Normed}, DIFFERS),
        ({"plan": WITHOUT_NORM, "block": OneHead}, DIFFERS),
        ({"plan": MLP, "block": Zero}, DIFFERS),
        ({"plan": MLP, "block": Small}, DIFFERS),
        ({"plan": MLP, "block": Small, "arguments": BF16}, DIFFERS),
        ({"plan": INNER_MLP, "block": ByMethod}, DIFFERS),
        ({"plan": MLP, "block": Late}, DIFFERS),
        ({"plan": MLP, "block": Viewed}, "it must take sizes from the tensors"),
        ({"plan": {"blocks.*.wide": "colwise"}}, "'blocks.0.wide' is colwise, but no module is rowwise"),
        ({"plan": {**MLP, "head": "colwise", "blocks.1.query": "rowwise"}}, "it must take sizes from the tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_split_that_changes_numbers_is_refused_on_all(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    for each in try_on_ranks(2, train_tower, str(tmp_path), 4, {"tensor": 2}, **options):
        assert isinstance(each, RankFailed)
        assert isinstance(each.error, ValueError)
        assert text in str(each.error)


def places(model: nn.Module, **styles: str) -> list[Place]:
    return [
        Place(name, style) for name, _ in model.named_modules() for end, style in styles.items() if name.endswith(end)
    ]


def test_regions_hold_the_begin_and_the_end_of_a_split() -> None:
    model = Tower()
    found = find_regions(model, places(model, wide="colwise", narrow="rowwise", head="colwise_gather_output"))
    assert [region.name for region in found] == ["blocks.0", "blocks.1"]
    nested = nn.ModuleDict({"up": nn.ModuleList([nn.Linear(2, 2)]), "down": nn.ModuleDict({"linear": nn.Linear(2, 2)})})
    outer = nn.Sequential(nn.Identity())
    outer.add_module("mlp", nested)
    found = find_regions(outer, [Place("mlp.up.0", "colwise"), Place("mlp.down.linear", "rowwise")])
    assert [region.name for region in found] == [""]
    with pytest.raises(ValueError, match=r"'blocks.0.narrow' is rowwise, but no module is colwise"):
        find_regions(model, places(model, narrow="rowwise"))


class Counted(Attention):
    """Its second process sees other numbers: what a dataset or a collator that depends on the rank would give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + torch.distributed.get_rank()))


@pytest.mark.distributed
def test_a_batch_that_differs_in_a_group_is_refused(tmp_path: Path) -> None:
    for each in try_on_ranks(2, train_tower, str(tmp_path), 4, {"tensor": 2}, block=Counted):
        assert isinstance(each, RankFailed)
        assert isinstance(each.error, ValueError)
        assert "tensor_parallel" in str(each.error)


def check_passes(mesh: dict[str, int]) -> list[int]:
    """Forward passes of the model in three steps, and the calls of a block."""
    strategy = FSDP(device="cpu", mesh=mesh, tensor_parallel=PLAN)
    strategy.setup()
    model = Tower(dropout=0.5)
    strategy.prepare(model)
    calls = [0]
    model.blocks[0].register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    tokens = torch.arange(6)[None]
    counts = []
    for _ in range(3):
        before, drawn = calls[0], torch.random.get_rng_state()
        model.eval()
        model(tokens, tokens, tokens)
        model.train()
        torch.random.set_rng_state(drawn)
        first = model(tokens, tokens, tokens)["loss"]
        torch.random.set_rng_state(drawn)
        assert torch.equal(first, model(tokens, tokens, tokens)["loss"])
        counts.append(calls[0] - before)
    return counts


@pytest.mark.distributed
def test_the_check_is_made_once_in_each_mode_and_draws_no_random_numbers() -> None:
    assert on_ranks(2, check_passes, {"tensor": 2}) == [[9, 3, 3]] * 2  # each check runs a block three times


def evaluate_tower(folder: str, mesh: dict[str, int], block: type[Attention], plan: dict[str, str]) -> list[float]:
    """Losses of an evaluation, of which the second tensor group has fewer passes."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
        per_device_eval_batch_size=1,
    )  # fmt: skip
    strategy = FSDP(device="cpu", mesh=mesh, tensor_parallel=plan) if mesh else None
    trainer = Trainer(Tower(block), args, None, texts(5), data_collator=padded, strategy=strategy)
    return [trainer.evaluate()["eval_loss"] for _ in range(2)]


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}])
def test_a_run_that_only_evaluates_is_checked(tmp_path: Path, mesh: dict[str, int]) -> None:
    size = 2 * len(mesh)
    for each in try_on_ranks(size, evaluate_tower, str(tmp_path), mesh, Normed, MLP):
        assert isinstance(each, RankFailed)
        assert DIFFERS in str(each.error)
    alone = evaluate_tower(str(tmp_path), {}, Attention, PLAN)
    for each in on_ranks(size, evaluate_tower, str(tmp_path), mesh, Attention, PLAN):
        assert each == pytest.approx(alone, rel=1e-9)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        {"plan": MLP, "block": Dropped},
        {"plan": INNER_MLP, "block": RightByMethod},
        {"plan": PLAN, "arguments": BF16},
    ],
    ids=["dropout", "by-method", "bf16"],
)
def test_right_splits_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    found = on_ranks(2, train_tower, str(tmp_path), 4, {"tensor": 2}, **options)[0]["weights"]
    assert float(found.get("blocks.0.passes", 8)) == 8

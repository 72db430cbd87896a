"""Callbacks under FSDP: the same as under DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.block_training import Blocks, Records, make_trainer, whole, whole_weights
from kit.ranks import on_ranks
from torch import nn

from trainer_kit.callbacks import EMA, Freezing, Throughput
from trainer_kit.checkpoint import read_state


class Scaled(Blocks):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5).double())

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(x * self.scale, labels)


def throughput(folder: str, strategy: str, compiled: bool | dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    records = Records()
    trainer = make_trainer(folder, strategy, [records], Scaled(), torch_compile=compiled, eval_strategy="epoch")
    try:
        with warnings.catch_warnings():  # torch's compiler looks at the gradients of gathered weights
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            trainer.train()
    finally:
        torch._dynamo.reset()
    counted = next(each for each in trainer.events.callbacks if isinstance(each, Throughput))
    parts = {name: value * 2**30 for name, value in records.seen[-1].items() if name.startswith("anatomy/")}
    return {
        "names": {"mfu", "model_flops_per_second", "hardware_flops_per_second"} & records.seen[-1].keys(),
        "operations": counted._operations.so_far(trainer.run), "parts": parts,
        "weights": whole_weights(trainer.run.model),
    }  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize(
    "compiled", [False, {"backend": "aot_eager"}, {"backend": "aot_eager", "regional": True}], ids=str
)
def test_operations_are_those_of_whole_weights_and_memory_that_of_shards(
    tmp_path: Path, compiled: bool | dict[str, Any]
) -> None:
    theirs = on_ranks(2, throughput, str(tmp_path), "ddp", compiled)
    for ours, other in zip(on_ranks(2, throughput, str(tmp_path), "fsdp", compiled), theirs, strict=True):
        assert ours["names"] == other["names"] >= {"model_flops_per_second"}
        assert ours["operations"] == other["operations"]
        assert ours["operations"].model > 0
        for name, size in other["parts"].items():
            assert ours["parts"][name] == pytest.approx(size / 2, rel=0.05)
        torch.testing.assert_close(ours["weights"], other["weights"], rtol=0, atol=1e-12)


def averaged(folder: str, strategy: str) -> dict[str, Any]:
    ema, seen = EMA(decay=0.5, start_step=1), Records()
    trainer = make_trainer(folder, strategy, [ema, seen], eval_strategy="steps", eval_steps=1)
    trainer.train()
    copied = Blocks()
    ema.copy_to(copied)
    return {
        "weights": whole_weights(trainer.run.model), "copied": whole_weights(copied),
        "loss": trainer.evaluate()["eval_loss"],
        "averages": {name: whole(value) for name, value in ema.state_dict()["averages"].items()},
        "losses": [record["eval_loss"] for record in seen.evaluated],
    }  # fmt: skip


@pytest.mark.distributed
def test_averages_of_shards_are_those_of_whole_weights(tmp_path: Path) -> None:
    theirs = on_ranks(2, averaged, str(tmp_path), "ddp")
    for ours, other in zip(on_ranks(2, averaged, str(tmp_path), "fsdp"), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)
        assert len(set(ours["losses"])) == 4
        assert not torch.equal(ours["averages"]["head.weight"], ours["weights"]["head.weight"])


def frozen(folder: str, strategy: str) -> dict[str, Any]:
    records = Records()
    freezing = [Freezing(["blocks.0.*", "embedding.*"], until_step=2), Freezing("head.*", from_step=3)]
    trainer = make_trainer(folder, strategy, [*freezing, records], max_grad_norm=0.1)
    trainer.train()
    return {
        "weights": whole_weights(trainer.run.model), "norms": [record["grad_norm"] for record in records.seen],
        "losses": [record["loss"] for record in records.seen],
    }  # fmt: skip


@pytest.mark.distributed
def test_frozen_weights_are_those_of_ddp(tmp_path: Path) -> None:
    theirs = on_ranks(2, frozen, str(tmp_path), "ddp")
    for ours, other in zip(on_ranks(2, frozen, str(tmp_path), "fsdp"), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)


def resumed_averages(folder: str, strategy: str) -> dict[str, torch.Tensor]:
    ema = EMA(decay=0.9)
    generator = torch.Generator().manual_seed(2)
    saved = {name: torch.randn(each.shape, generator=generator).double() for name, each in Blocks().named_parameters()}
    ema.load_state_dict({"averages": saved})
    trainer = make_trainer(folder, strategy, [ema], max_steps=2)
    trainer.train()
    return {name: whole(value) for name, value in ema.state_dict()["averages"].items()}


@pytest.mark.distributed
def test_averages_of_a_checkpoint_go_on(tmp_path: Path) -> None:
    (theirs, _), ours = (on_ranks(2, resumed_averages, str(tmp_path), each) for each in ("ddp", "fsdp"))
    for each in ours:
        torch.testing.assert_close(each, theirs, rtol=0, atol=1e-12)


def saved_averages(folder: str, steps: int, resume: bool) -> dict[str, Any]:
    ema = EMA(decay=0.9)
    trainer = make_trainer(folder, "fsdp", [ema], max_steps=steps, lr_scheduler_type="constant", save_strategy="epoch")
    trainer.train(resume_from_checkpoint=resume)
    averages = {name: whole(value) for name, value in ema.state_dict()["averages"].items()}
    return {"averages": averages, "weights": whole_weights(trainer.run.model)}


@pytest.mark.distributed
def test_checkpoints_hold_whole_averages_and_go_on_with_the_same_bits(tmp_path: Path) -> None:
    through, _ = on_ranks(2, saved_averages, str(tmp_path / "through"), 4, resume=False)
    half, _ = on_ranks(2, saved_averages, str(tmp_path / "halves"), 2, resume=False)
    (checkpoint,) = (tmp_path / "halves").glob("checkpoint-*")
    kept = read_state(checkpoint, "callbacks")["EMA"]["averages"]
    assert kept.keys() == half["averages"].keys()
    assert all(torch.equal(kept[name], average) for name, average in half["averages"].items())
    for each in on_ranks(2, saved_averages, str(tmp_path / "halves"), 4, resume=True):
        for kind in ("averages", "weights"):
            assert all(torch.equal(value, through[kind][name]) for name, value in each[kind].items())

"""Training under FSDP: steps that are not finite, streams, lengths, recomputation, adapters; the same as under DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.block_training import Blocks, Records, arguments, rows, whole_weights
from kit.far_info import FarInfo
from kit.parts import parts_of
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_kit import FSDP, Trainer, load_checkpoint_in_model
from trainer_kit.checkpoint import verify
from trainer_kit.errors import DataError, NonFiniteError
from trainer_kit.strategies.multinode_session import MultiNodeSession


def train_nonfinite(folder: str, strategy: str, nonfinite: str, fused: bool) -> dict[str, Any]:
    """The second step has an infinite row, on one rank; the step is skipped on the device where that is `fused`."""
    torch.manual_seed(0)
    model, data = Blocks(), rows(16)
    data[9]["x"] = torch.full((4,), float("inf")).double()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1} if nonfinite == "rollback" else {}
    args = arguments(folder, strategy, nonfinite=nonfinite, max_grad_value=0.05, **options)
    trainer = Trainer(model, args, data, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    if fused:
        trainer.run.strategy.device_info = FarInfo(trainer.run.strategy.device)
    error = None
    try:
        trainer.train()
    except NonFiniteError as raised:
        error = str(raised)
    return {"error": error, "weights": whole_weights(model), "step": trainer.run.state.step}


@pytest.mark.distributed
@pytest.mark.parametrize("nonfinite", ["skip", "stop", "rollback"])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_are_not_finite_end_as_under_ddp(tmp_path: Path, nonfinite: str, fused: bool) -> None:
    theirs, _ = on_ranks(2, train_nonfinite, str(tmp_path / "ddp"), "ddp", nonfinite, fused)
    for ours in on_ranks(2, train_nonfinite, str(tmp_path / "fsdp"), "fsdp", nonfinite, fused):
        assert (ours["error"], ours["step"]) == (theirs["error"], theirs["step"])
        assert (ours["error"] is not None) == (nonfinite == "stop")
        assert all(torch.isfinite(each).all() for each in ours["weights"].values())
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=1e-12)


class Recomputed(Blocks):
    """Recomputes its blocks in the backward pass, as transformers does by the same method."""

    recomputes = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.recomputes = True
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, **gradient_checkpointing_kwargs)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows of which the last ones leave a rank without any; with `uneven`, ranks see different numbers of them."""

    def __init__(self, uneven: bool = False) -> None:
        self.uneven = uneven

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(rows(9 + 4 * (self.uneven and int(os.environ["RANK"]))))


def padded_rows(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")}


def train_kind(folder: str, strategy: str, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    records, model, data, options = Records(), Blocks(), rows(13), {}
    if kind == "recomputed":
        model, options = Recomputed(), {"gradient_checkpointing": True}
    elif kind == "lengths":
        data = [{**row, "input_ids": torch.arange(1 + 5 * index % 7)} for index, row in enumerate(data)]
        options = {"group_by_length": True}
    elif kind == "stream":
        data, options = Stream(), {"max_steps": 5}  # type: ignore[assignment]
    args = arguments(folder, strategy, **options)
    trainer = Trainer(model, args, data, rows(5), data_collator=padded_rows, callbacks=[records])
    trainer.train()
    assert kind != "recomputed" or model.recomputes
    names = ("loss", "grad_norm", "epoch")
    return {
        "records": [[record.get(name) for name in names] for record in records.seen],
        "weights": whole_weights(model), "eval_loss": trainer.evaluate()["eval_loss"],
    }  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["recomputed", "lengths", "stream"])
def test_kinds_of_training_are_those_of_ddp(tmp_path: Path, kind: str) -> None:
    theirs, _ = on_ranks(2, train_kind, str(tmp_path), "ddp", kind)
    for ours in on_ranks(2, train_kind, str(tmp_path), "fsdp", kind):
        for record, other in zip(ours["records"], theirs["records"], strict=True):
            assert record == pytest.approx(other, abs=1e-12)
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-12)
        torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=1e-12)


def train_uneven_stream(folder: str) -> None:
    Trainer(Blocks(), arguments(folder, "fsdp", max_steps=5), Stream(uneven=True), data_collator=padded_rows).train()


@pytest.mark.distributed
def test_a_stream_that_differs_between_ranks_is_refused_on_all(tmp_path: Path) -> None:
    for each in try_on_ranks(2, train_uneven_stream, str(tmp_path)):
        assert isinstance(each, RankFailed)
        assert isinstance(each.error, DataError)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 and an adapter of low rank in float32, as peft puts them in the place of a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.to(torch.bfloat16).requires_grad_(requires_grad=False)
        self.narrow = nn.Linear(layer.in_features, 2, bias=False)
        self.wide = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.wide(self.narrow(x.float())).to(x.dtype)


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Adapted(nn.Linear(4, 4)) for _ in range(3)))
        self.head = nn.Linear(4, 5).to(torch.bfloat16).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks(x.to(torch.bfloat16))).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train_adapters(folder: str, strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Adapters()
    Trainer(model, arguments(folder, strategy, save_strategy="epoch"), rows(13)).train()
    return whole_weights(model)


@pytest.mark.distributed
def test_adapters_in_float32_train_within_frozen_weights_in_bfloat16(tmp_path: Path) -> None:
    (theirs, _), ours = (on_ranks(2, train_adapters, str(tmp_path / each), each) for each in ("ddp", "fsdp"))
    torch.manual_seed(0)
    assert not torch.equal(theirs["blocks.0.wide.weight"], Adapters().blocks[0].wide.weight)
    for each in ours:
        torch.testing.assert_close(each, theirs, rtol=0, atol=1e-6)
    saved = Adapters()
    load_checkpoint_in_model(saved, max((tmp_path / "fsdp").glob("checkpoint-*")))
    assert all(torch.equal(value, ours[0][name]) for name, value in saved.state_dict().items())


@parts_of(200)
def train_apart(folder: str, apart: bool, steps: int) -> dict[str, Any]:
    """With `apart`, each rank is a machine, of which only the first sees the folder; resumes where it can."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            for name, value in {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
                patch.setenv(name, value)
            patch.setattr(MultiNodeSession, "_ranks_without", lambda self, directory: [1])
        options = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
        args = arguments(folder, "auto", max_steps=steps, **options)
        trainer = Trainer(Blocks(), args, rows(13), strategy=FSDP(device="cpu"))
        trainer.train(resume_from_checkpoint=True)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    assert trainer._loop is not None
    source = trainer._loop.checkpoints.source
    return {
        "weights": whole_weights(trainer.run.model), "writers": trainer._loop.checkpoints.saver.writers.ranks,
        "is_copy": source is not None and not source.is_relative_to(folder),
    }  # fmt: skip


@pytest.mark.distributed
def test_a_folder_that_only_one_machine_sees(tmp_path: Path) -> None:
    """The main process writes what the others have of the state, and sends them the checkpoint of a resume."""
    first, second = on_ranks(2, train_apart, str(tmp_path / "apart"), True, 2)
    assert first["writers"] == second["writers"] == [0]
    verify(tmp_path / "apart/checkpoint-2")
    resumed = on_ranks(2, train_apart, str(tmp_path / "apart"), True, 4)
    assert [each["is_copy"] for each in resumed] == [False, True]
    straight, _ = on_ranks(2, train_apart, str(tmp_path / "shared"), False, 4)
    assert straight["writers"] == [0, 1]
    for each in resumed:
        assert all(torch.equal(each["weights"][name], weight) for name, weight in straight["weights"].items())


def resume_other(folder: str, classes: int) -> str:
    args = arguments(folder, "fsdp", save_strategy="steps", save_steps=1, max_steps=classes)
    Trainer(Blocks(classes=classes), args, rows(13)).train(resume_from_checkpoint=True)
    return "trained"


@pytest.mark.distributed
def test_the_checkpoint_of_another_model_is_refused_by_whole_shapes(tmp_path: Path) -> None:
    on_ranks(2, resume_other, str(tmp_path), 5)
    for each in try_on_ranks(2, resume_other, str(tmp_path), 6):
        assert isinstance(each, RankFailed)
        assert "of other shape: 'head.weight' is of shape [5, 6] there and [6, 6] in the model" in str(each.error)

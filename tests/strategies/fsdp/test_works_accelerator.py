"""A hand-written loop under FSDP: the same numbers as on one process, and states that other layouts load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.block_training import Blocks, rows, whole_weights
from kit.parts import parts_of
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from trainer_kit import load_checkpoint_in_model
from trainer_kit.accelerator import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    set_seed,
)
from trainer_kit.checkpoint import contribution
from trainer_kit.checkpoint.format.commit import write_part

PLUGIN = {"transformer_cls_names_to_wrap": ["Block"]}


class Loop:
    """A loop whose batches are those of one process with batches of 4, two of which make a step.

    The optimizer and the parameters that are clipped are from before `prepare`.
    """

    def __init__(self, sharded: dict[str, Any] | None, clips: str = "norm", folder: str | None = None) -> None:
        set_seed(0)
        options: dict[str, Any] = {} if sharded is None else {"fsdp_plugin": FullyShardedDataParallelPlugin(**sharded)}
        ours = self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer="once", project_dir=folder, **options
        )
        model = Blocks()
        self.before = [*model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = DataLoader(rows(24), batch_size=4 // ours.num_processes, shuffle=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
        self.optimizer, self.loader, self.model, self.scheduler = ours.prepare(optimizer, loader, model, scheduler)
        self.clips = clips
        self.norms: list[float] = []

    def batches(self) -> Iterator[None]:
        ours = self.accelerator
        for batch in self.loader:
            with ours.accumulate(self.model):
                ours.backward(self.model(**batch)["loss"])
                if self.clips == "value":
                    ours.clip_grad_value_(self.before, 0.01)
                elif ours.sync_gradients:
                    order = 2 if self.clips == "norm" else 1
                    norm = ours.clip_grad_norm_(self.before, 0.5, order)
                    assert type(norm) is torch.Tensor
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            yield

    def found(self) -> dict[str, Any]:
        with torch.no_grad():
            logits = [self.model(batch["x"])["logits"].sum() for batch in self.loader]
        every = torch.stack(logits).sum()
        return {
            "norms": self.norms, "weights": whole_weights(self.accelerator.unwrap_model(self.model)),
            "logits": self.accelerator.reduce(every).item(), "lr": self.scheduler.get_last_lr(),
            "sharded": all(isinstance(each, DTensor) for each in self.model.parameters()),
        }  # fmt: skip


def run_loop(sharded: dict[str, Any] | None, clips: str) -> dict[str, Any]:
    loop = Loop(sharded, clips)
    for _ in range(2):
        for _ in loop.batches():
            pass
    return {**loop.found(), "type": loop.accelerator.distributed_type}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=1e-12)
    for name in ("norms", "logits", "lr"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-11), name


@pytest.mark.distributed
@pytest.mark.parametrize("clips", ["norm", "value", "norm of order 1"])
def test_a_loop_has_the_numbers_of_one_process(clips: str) -> None:
    alone = run_loop(None, clips)
    assert not alone["sharded"]
    for each in on_ranks(2, run_loop, PLUGIN, clips):
        same(each, alone)
        assert each["sharded"]
        assert each["type"] == DistributedType.FSDP


def launched() -> bool:
    os.environ["TRAINER_KIT_FSDP"] = "1"
    try:
        return bool(Loop(None).found()["sharded"])
    finally:
        del os.environ["TRAINER_KIT_FSDP"]


@pytest.mark.distributed
def test_the_launcher_shards_a_loop() -> None:
    assert on_ranks(2, launched) == [True, True]


@parts_of(500)
def saved(folder: str, sharded: dict[str, Any] | None = PLUGIN) -> dict[str, Any]:
    """Saves in the middle of the second step, and goes on."""
    written = list[str]()
    loop = Loop(sharded, folder=folder)
    batches = loop.batches()
    for _ in range(3):
        next(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contribution, "write_part", lambda *given: written.extend(files := write_part(*given)) or files)
        loop.accelerator.save_state()
    for _ in batches:
        pass
    loop.accelerator.save_model(loop.model, Path(folder) / "model")
    state = loop.accelerator.get_state_dict(loop.model)
    return {**loop.found(), "state": state, "written": written}


def resumed(sharded: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    loop = Loop(sharded, folder=folder)
    loop.accelerator.load_state()
    for _ in loop.batches():
        pass
    return loop.found()


@pytest.mark.distributed
@pytest.mark.parametrize("before", [PLUGIN, None], ids=["fsdp", "ddp"])
def test_a_state_is_written_by_all_processes_and_loaded_by_other_layouts(tmp_path: Path, before: Any) -> None:
    first, second = on_ranks(2, saved, str(tmp_path), before)
    assert {Path(name).name for name in second["written"]} == {
        f"{stem}-00002-of-00002.safetensors" for stem in ("model", "optimizer", "gradients")
    }  # fmt: skip
    assert not {*first["written"]} & {*second["written"]}
    if before is not None:
        assert second["state"] == {}
    assert all(torch.equal(first["state"][name], weight) for name, weight in first["weights"].items())
    fresh = Blocks()
    load_checkpoint_in_model(fresh, tmp_path / "model")
    assert all(torch.equal(weight, first["weights"][name]) for name, weight in fresh.state_dict().items())
    for each in on_ranks(2, resumed, PLUGIN, str(tmp_path)):
        assert before is None or all(
            torch.equal(each["weights"][name], weight) for name, weight in first["weights"].items()
        )
        same({**each, "norms": []}, {**first, "norms": []})
        assert each["norms"] == pytest.approx(first["norms"][1:], abs=1e-11)
    alone = resumed(None, str(tmp_path))
    same({**first, "norms": first["norms"][1:]}, alone)


def used_state() -> None:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**{name: torch.stack([row[name] for row in rows(3)]) for name in ("x", "labels")})["loss"].backward()
    optimizer.step()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.prepare(model, optimizer)


def handler_of_ddp() -> None:
    Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(),
        kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)],
    )  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("misuse", "text"),
    [(used_state, "has a state of the parameters before they were sharded"), (handler_of_ddp, "is an option of DDP")],
)
def test_refusals(misuse: Any, text: str) -> None:
    for each in try_on_ranks(2, misuse):
        assert isinstance(each, RankFailed)
        assert text in str(each.error)


def test_another_version_of_the_plugin_is_refused() -> None:
    with pytest.raises(ValueError, match="fsdp_version=1 is not available; use 2"):
        FullyShardedDataParallelPlugin(fsdp_version=1)

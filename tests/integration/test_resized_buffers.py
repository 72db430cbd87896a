"""Runs of models with buffers that change their shape in a forward pass and that their modules resize when loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization
from kit.ranks import on_ranks
from kit.resized import Remembering
from kit.trainer import arguments
from torch import nn

from trainer_kit import FSDP, Trainer, load_checkpoint_in_model
from trainer_kit.callbacks import EMA


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dequant(self.linear(self.quant(x)))
        return found


def quantized() -> nn.Module:
    model = Quantized().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        prepared: nn.Module = torch.ao.quantization.prepare_qat(model)
    return prepared


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["labels"]).square().mean()


def trainer(folder: Path, model: nn.Module, **changes: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(3, generator=generator), "labels": torch.randn(2, generator=generator)} for _ in range(8)]
    given = {each: changes.pop(each) for each in ("callbacks", "strategy", "weights") if each in changes}
    defaults: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    args = arguments(folder, **defaults | {"lr_scheduler_type": "constant"} | changes)
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows, compute_loss=loss, **given)


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


MODELS = pytest.mark.parametrize("make", [quantized, Remembering], ids=["quantized", "bank"])


@MODELS
@pytest.mark.parametrize("averages", [False, True], ids=["", "averages"])
def test_a_resumed_run_has_the_bits_of_one_never_stopped(
    tmp_path: Path, make: Callable[[], nn.Module], averages: bool
) -> None:
    def run(folder: str, steps: int, resume: bool = False) -> tuple[nn.Module, EMA, Trainer]:
        model, ema = make(), EMA(0.5, every=2)
        made = trainer(tmp_path / folder, model, max_steps=steps, callbacks=[ema] if averages else [])
        made.train(resume_from_checkpoint=resume)
        return model, ema, made

    straight, its_averages, whole = run("straight", 5)
    run("stopped", 3)
    resumed, averages_again, again = run("stopped", 5, resume=True)
    assert same(resumed, straight)
    assert again.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    if averages:
        mine, theirs = averages_again.state_dict()["averages"], its_averages.state_dict()["averages"]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@MODELS
def test_saved_weights_are_loaded_into_a_new_model(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    model, loaded, begun = make(), make(), make()
    made = trainer(tmp_path, model)
    made.train()
    made.save_model(tmp_path / "saved", max_shard_size=16)
    load_checkpoint_in_model(loaded, tmp_path / "saved")
    assert same(loaded, model)
    trainer(tmp_path / "next", begun, weights=tmp_path / "saved", max_steps=1, learning_rate=0.0).evaluate()
    assert begun.state_dict().keys() == model.state_dict().keys()
    assert all(begun.state_dict()[name].shape == value.shape for name, value in model.state_dict().items())


@MODELS
def test_the_best_model_is_loaded(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    best, stopped = make(), make()
    changes = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 100.0, "max_grad_norm": 0.0}
    changes |= {"metric_for_best_model": "eval_loss", "greater_is_better": make is Remembering}
    made = trainer(tmp_path / "best", best, load_best_model_at_end=True, **changes)
    made.train()
    assert made.run.state.best_step == 2
    trainer(tmp_path / "stopped", stopped, **changes | {"max_steps": 2}).train()
    assert same(best, stopped)


def resumed_on_shards(folder: str) -> str:
    def make(steps: int) -> Trainer:
        strategy = FSDP(device="cpu", units=["linear"])
        return trainer(Path(folder), Remembering(), strategy=strategy, max_steps=steps)

    make(1).train()
    with pytest.raises(ValueError, match="strategy='fsdp'") as caught:
        make(2).train(resume_from_checkpoint=True)
    return str(caught.value)


@pytest.mark.distributed
def test_shards_are_not_loaded_by_modules(tmp_path: Path) -> None:
    for error in on_ranks(2, resumed_on_shards, str(tmp_path)):
        assert error.startswith("'bank.kept' is of shape [2, 2] in the files and [0, 2] in the model, whose module")

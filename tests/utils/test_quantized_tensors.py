"""The 8-bit optimizers of torchao and bitsandbytes train, are saved, and resume with the same bits."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch import nn

from trainer_kit import Callback, Run, Trainer
from trainer_kit.checkpoint import verify
from trainer_kit.checkpoint.format.compare import compare
from trainer_kit.optim import make_optimizer
from trainer_kit.utils.optimizer_state import load_optimizer_state, optimizer_state
from trainer_kit.utils.pytree import flatten_state, tensors, unflatten_state
from trainer_kit.utils.quantized_tensors import from_plain, is_quantized, parts_of, to_plain

PACKAGES = ["bitsandbytes", "torchao"]


def imported(package: str) -> Any:
    """Return a package's module of optimizers, or skip the test."""
    root = logging.getLogger()
    level = root.level
    try:
        return pytest.importorskip(f"{package}.optim", reason=f"needs {package}", exc_type=ImportError)
    finally:
        root.setLevel(level)


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that is installed, as if it were the only one; its steps are not compiled."""
    name: str = request.param
    imported(name)
    for other in PACKAGES:
        if other != name:
            monkeypatch.setitem(sys.modules, f"{other}.optim", None)
    with torch.compiler.set_stance("force_eager"):
        yield name


class Wide(nn.Module):
    """Two layers whose states are quantized, and one whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.requests.stop = True


def trainer(folder: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(64, generator=generator), "labels": torch.tensor(number % 2)} for number in range(64)]
    given = {"optim": "adamw_8bit", "learning_rate": 0.01, "weight_decay": 0.1, "max_steps": 10}
    args = arguments(folder, **given, save_strategy="steps", save_steps=5, **changes)
    return Trainer(Wide(), args, data, callbacks=callbacks)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_that_is_stopped_resumes_with_the_same_bits(tmp_path: Path, package: str, asynchronous: bool) -> None:
    straight = trainer(tmp_path / "straight", async_save=asynchronous)
    straight.train()
    assert type(straight.run.optimizer).__module__.startswith(package)
    trainer(tmp_path / "resumed", StopAt(5), async_save=asynchronous).train()
    resumed = trainer(tmp_path / "resumed", async_save=asynchronous)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run.state.step == 10
    last = [tmp_path / name / "run" / "checkpoint-10" for name in ("straight", "resumed")]
    for directory in last:
        verify(directory)
    found = compare(*last)
    assert found.tensors > 20
    assert not found.differing
    assert not found.changed
    state = straight.run.strategy.optimizer_state(straight.run.optimizer)  # type: ignore[arg-type]
    assert sum(each.dtype == torch.uint8 for each in tensors(state)) == 4


def test_the_state_of_one_package_is_not_that_of_another(package: str) -> None:
    module = Wide()
    optimizer = make_optimizer(module, arguments(Path(), optim="adamw_8bit"))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = unflatten_state(*flatten_state(optimizer_state(optimizer)))
    saved["trainer_kit.package"] = "another"
    with pytest.raises(ValueError, match=f"by the AdamW8bit of another, and this one is of {package}, which keeps"):
        load_optimizer_state(optimizer, saved)
    del saved["trainer_kit.package"]
    with pytest.raises(ValueError, match="was saved by the AdamW8bit of another package, and"):
        load_optimizer_state(optimizer, saved)


def state_8bit() -> Any:
    zeros = imported("torchao").AdamW8bit._subclass_zeros(torch.zeros(64, 64), True, 256)
    return zeros.copy_(torch.randn(64, 64))


def test_a_tensor_goes_through_plain_dicts_and_json() -> None:
    tensor = state_8bit()
    tree = {"moments": [tensor, torch.ones(2)], "step": 3}
    plain = to_plain(tree)
    assert plain["moments"][0]["tensors"]["codes"] is tensor.codes
    assert plain["moments"][1] is tree["moments"][1]  # type: ignore[index]
    back = from_plain(unflatten_state(*flatten_state(plain)))
    assert type(back["moments"][0]) is type(tensor)
    assert torch.equal(back["moments"][0].dequantize(), tensor.dequantize())
    assert [part.dtype for part in parts_of(tensor)] == [torch.uint8, torch.float32, torch.float32]


def test_plain_tensors_are_their_own_part() -> None:
    tensor = torch.ones(2)
    assert not is_quantized(tensor)
    assert [part is tensor for part in parts_of(tensor)] == [True]


@pytest.mark.parametrize("path", ["os.system", "torch.Tensor", "torchao_evil.Thing", "torchao.optim.AdamW8bit", ""])
def test_a_checkpoint_has_no_other_class_imported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append(name) or real(name))
    if path.startswith("torchao."):
        imported("torchao")
    with pytest.raises(ValueError, match="is no tensor class of torchao"):
        from_plain({"trainer_kit.class": path, "tensors": {}, "context": []})
    assert all(name.startswith("torchao.") for name in seen)

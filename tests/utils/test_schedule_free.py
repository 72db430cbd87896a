"""Optimizers of schedulefree: exact switches, and how they train."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.optim import make_optimizer
from trainer_kit.utils.schedule_free import averaged_weights, schedule_free, set_training, switches_weights

schedulefree = pytest.importorskip("schedulefree")
NAMES = ("schedule_free_adamw", "schedule_free_sgd")


def dataset(count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(n % 3)} for n in range(count)]


def made() -> Linear:
    torch.manual_seed(0)
    return Linear()


def trainer_of(folder: Path, optim: str, model: torch.nn.Module | None = None, **changes: Any) -> Trainer:
    args = arguments(
        folder, **{
            "max_steps": 8, "optim": optim, "learning_rate": 0.1, "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 2, "weight_decay": 0.01, "per_device_train_batch_size": 4, "save_strategy": "steps",
            "save_steps": 3, **changes,
        }
    )  # fmt: skip
    return Trainer(model or made(), args, dataset(), dataset())


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


@pytest.mark.parametrize("optim", NAMES)
def test_training_is_that_of_the_package(tmp_path: Path, optim: str) -> None:
    trainer = trainer_of(tmp_path, optim, save_strategy="no", max_grad_norm=0.0, lr_scheduler_type="constant",
                         warmup_steps=0, weight_decay=0.0, per_device_train_batch_size=24)  # fmt: skip
    trainer.train()
    model = made()
    kind = schedulefree.AdamWScheduleFree if optim == "schedule_free_adamw" else schedulefree.SGDScheduleFree
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.train()
    batch = {name: torch.stack([sample[name] for sample in dataset()]) for name in ("x", "labels")}
    for _ in range(8):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    torch.testing.assert_close(weights(trainer.run.model), weights(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("optim", NAMES)
def test_a_resume_and_evaluations_leave_the_bits(tmp_path: Path, optim: str, is_async: bool) -> None:
    plain = trainer_of(tmp_path / "plain", optim, save_strategy="no")
    plain.train()
    whole = trainer_of(
        tmp_path / "whole",
        optim,
        async_save=is_async,
        eval_strategy="steps",
        eval_steps=2,
    )
    whole.train()
    assert torch.equal(weights(plain.run.model), weights(whole.run.model))
    for step in (6, 8):
        resumed = trainer_of(tmp_path / f"from-{step}", optim)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / f"checkpoint-{min(step, 6)}"))
        assert torch.equal(weights(plain.run.model), weights(resumed.run.model))


def test_checkpoints_and_evaluations_have_the_averaged_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = trainer_of(tmp_path, "schedule_free_adamw", eval_strategy="steps", eval_steps=8)
    trainer.train()
    final = load_file(tmp_path / "run" / "checkpoint-8" / "model.safetensors")
    for name, value in trainer.run.model.state_dict().items():
        assert torch.equal(final[name], value)
    optimizer: Any = trainer.run.optimizer
    averaged = weights(trainer.run.model)
    assert not optimizer.param_groups[0]["train_mode"]
    loss = trainer.evaluate()["eval_loss"]
    assert loss == pytest.approx(trainer.run.state.best_metric or loss)
    optimizer.train()
    assert not torch.equal(weights(trainer.run.model), averaged)
    assert trainer.evaluate()["eval_loss"] == loss


def test_a_rollback_trains_on_from_the_training_weights(tmp_path: Path) -> None:
    class Poisoned(Linear):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            Poisoned.calls += self.training
            loss = super().forward(x, labels)
            return loss * (float("nan") if self.training and Poisoned.calls == 5 else 1.0)

    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, "schedule_free_sgd", Poisoned(), nonfinite="rollback", logging_steps=1)
    assert trainer.train().global_step == 8
    assert trainer.run.state.rollbacks == 1
    assert weights(trainer.run.model).isfinite().all()


def test_a_switch_is_exact_and_only_from_training() -> None:
    model = made()
    optimizer: Any = make_optimizer(model, arguments(Path(), optim="schedule_free_adamw", lr_scheduler_type="constant"))
    assert switches_weights(optimizer)
    for _ in range(3):
        model(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).backward()
        optimizer.step()
    before = weights(model)
    with averaged_weights(optimizer):
        inside = weights(model)
        state = copy.deepcopy(optimizer.state_dict())
        with averaged_weights(optimizer):
            assert torch.equal(weights(model), inside)
        assert torch.equal(weights(model), inside)
    assert torch.equal(weights(model), before)
    assert not torch.equal(inside, before)
    set_training(optimizer, False)
    optimizer.load_state_dict(state)
    set_training(optimizer, True)
    assert torch.equal(weights(model), before)


def test_other_optimizers_have_one_kind_of_weights() -> None:
    optimizer = torch.optim.SGD(made().parameters(), lr=0.1)
    assert not switches_weights(optimizer)
    set_training(optimizer, False)
    with averaged_weights(optimizer), averaged_weights(None):
        pass


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ImportError, match="needs a package of its own; run `pip install schedulefree`"):
        schedule_free("SGDScheduleFree", [], lr=0.1)

"""Optimizers with averaged weights for evaluation: exact switches, and how they train."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.optim import make_optimizer
from trainer_kit.utils.schedule_free import averaged_weights, schedule_free, set_training, switching_optimizers


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD that, like heavyball's, notes its mode in the groups at the first switch alone."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @property
    def mode(self) -> bool:
        return self.param_groups[0].get("train_mode", True)  # type: ignore[no-any-return]

    @mode.setter
    def mode(self, training: bool) -> None:
        self.param_groups[0]["train_mode"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.mode
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                parameter.lerp_(z, 1 - 1 / 0.9)
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, 1 / group["k"]).lerp_(z, 1 - 0.9)

    @torch.no_grad()
    def switch(self, training: bool) -> None:
        if self.mode == training:
            return
        self.mode = training
        for parameter, state in self.state.items():
            parameter.lerp_(state["z"], 1 - 0.9 if training else 1 - 1 / 0.9)

    def train(self) -> None:
        self.switch(True)

    def eval(self) -> None:
        self.switch(False)


class AttributeAveraging(Averaging):
    """One that, like pytorch_optimizer's ScheduleFreeWrapper, keeps its mode in an attribute, not in its state."""

    train_mode = False

    @property
    def mode(self) -> bool:
        return self.train_mode

    @mode.setter
    def mode(self, training: bool) -> None:
        self.train_mode = training


class Wrapper(torch.optim.Optimizer):
    """A wrapper without switches of its own, like pytorch_optimizer's OrthoGrad."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = Averaging(parameters)
        self.defaults = self.optimizer.defaults
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def mode(self) -> bool:
        return self.optimizer.mode

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


KINDS = (Averaging, AttributeAveraging, Wrapper)


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
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss)  # the user's own switch rounds


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
    assert switching_optimizers(optimizer) == [optimizer]
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


def own_trainer(
    folder: Path, optimizer: Callable[[Any], Any], dtype: torch.dtype = torch.float32, **changes: Any
) -> Trainer:
    model = made().to(dtype)
    samples = [{"x": each["x"].to(dtype), "labels": each["labels"]} for each in dataset()]
    args = arguments(
        folder, lr_scheduler_type="constant", per_device_train_batch_size=4,
        **{"max_steps": 8, "save_strategy": "steps", "save_steps": 3, **changes},
    )  # fmt: skip
    return Trainer(model, args, samples, samples, optimizer=optimizer(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_optimizer_switches_wherever_it_keeps_its_mode(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    from safetensors.torch import load_file

    trainer = own_trainer(tmp_path, kind, save_steps=8, eval_strategy="steps", eval_steps=8, max_grad_norm=0.0)
    trainer.train()
    optimizer: Any = trainer.run.optimizer
    averaged = weights(trainer.run.model)
    saved = load_file(tmp_path / "run" / "checkpoint-8" / "model.safetensors")
    assert torch.equal(torch.cat([saved[name].flatten() for name in trainer.run.model.state_dict()]), averaged)
    assert not optimizer.mode
    trainer.evaluate()
    assert torch.equal(weights(trainer.run.model), averaged)
    assert not any("training_weights" in state for state in optimizer.state.values())
    set_training(optimizer, True)
    assert optimizer.mode
    assert not torch.equal(weights(trainer.run.model), averaged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_an_own_optimizer_resumes_and_evaluates_with_the_same_bits(
    tmp_path: Path, kind: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    plain = own_trainer(tmp_path / "plain", kind, dtype, save_strategy="no")
    plain.train()
    whole = own_trainer(tmp_path / "whole", kind, dtype, eval_strategy="steps", eval_steps=2)
    whole.train()
    assert torch.equal(weights(plain.run.model), weights(whole.run.model))
    for step in (3, 6):
        resumed = own_trainer(tmp_path / f"from-{step}", kind, dtype)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / f"checkpoint-{step}"))
        assert torch.equal(weights(plain.run.model), weights(resumed.run.model))


def test_an_optimizer_that_keeps_no_mode_is_switched_once(tmp_path: Path) -> None:
    class Swapping(torch.optim.SGD):
        """Exchanges the weights and their mean in each call."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("mean", parameter.clone()).lerp_(parameter, 0.1)

        @torch.no_grad()
        def eval(self) -> None:
            for parameter, state in self.state.items():
                weights, mean = parameter.clone(), state["mean"].clone()
                parameter.copy_(mean)
                state["mean"].copy_(weights)

        train = eval

    trainer = own_trainer(tmp_path, lambda parameters: Swapping(parameters, lr=0.1), save_steps=8)
    trainer.train()
    averaged = weights(trainer.run.model)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert torch.equal(weights(trainer.run.model), averaged)
    assert first["eval_loss"] == second["eval_loss"]
    means = torch.cat([state["mean"].flatten() for state in trainer.run.optimizer.state.values()])  # type: ignore[union-attr]
    assert not torch.equal(means, averaged)


def test_an_optimizer_inside_one_that_switches_is_left_to_it() -> None:
    class Outer(Wrapper):
        def train(self) -> None:
            self.optimizer.train()

        def eval(self) -> None:
            self.optimizer.eval()

    model = made()
    wrapper, outer = Wrapper(model.parameters()), Outer(model.parameters())
    assert switching_optimizers(wrapper) == [wrapper.optimizer]
    assert switching_optimizers(outer) == [outer]
    for optimizer in (wrapper, outer):
        model(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).backward()
        optimizer.step()
        before = weights(model)
        with averaged_weights(optimizer):
            assert not optimizer.mode
        assert torch.equal(weights(model), before)


def test_an_optimizer_that_begins_with_the_averaged_weights_is_planned_and_estimated(tmp_path: Path) -> None:
    trainer = own_trainer(tmp_path, AttributeAveraging)
    assert "optimizer" in trainer.estimate(device_memory="1GiB").table()
    storage = trainer.plan().storage
    assert storage is not None
    assert storage.parts["optimizer"] == 2 * storage.parts["weights"]


def test_a_second_training_begins_with_the_weights_that_the_model_has(tmp_path: Path) -> None:
    trainer = own_trainer(tmp_path, Averaging, save_strategy="no", max_steps=1)
    trainer.train()
    model = trainer.run.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(100.0)
    trainer.train()
    assert weights(model).min() > 40


def test_other_optimizers_have_one_kind_of_weights() -> None:
    optimizer = torch.optim.SGD(made().parameters(), lr=0.1)
    assert not switching_optimizers(optimizer)
    set_training(optimizer, False)
    with averaged_weights(optimizer), averaged_weights(None):
        pass


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ImportError, match="needs a package of its own; run `pip install schedulefree`"):
        schedule_free("SGDScheduleFree", [], lr=0.1)

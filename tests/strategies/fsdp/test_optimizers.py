"""torch's optimizers on sharded parameters: the steps of one process, or a refusal."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kit.block_training import Blocks, arguments, rows, whole_weights
from kit.ranks import on_ranks

from trainer_kit import Trainer
from trainer_kit.strategies.fsdp.optimizers import shard_optimizer
from trainer_kit.utils.pytree import tensors

REFUSED = ("Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam")
KINDS = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)} - {"Optimizer", *REFUSED}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True}, "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5}, "AdamW": {"amsgrad": True}, "Adam": {"foreach": False},
    "ASGD": {"t0": 2.0},
}  # fmt: skip


class Flat(torch.optim.SGD):
    """Joins each gradient in one vector, as Prodigy and DAdaptAdam do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.flatten().dot(parameter.grad.flatten())


class Scaled(torch.optim.SGD):
    """Changes the norm of a gradient in place, as Lamb does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / parameter.grad.norm().clamp_(max=10)


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += torch.randn_like(parameter)


def refused(kind: Any, folder: str) -> str:
    model = Blocks()
    args = arguments(folder, "fsdp", per_device_train_batch_size=2, max_steps=2)
    with pytest.raises(RuntimeError) as caught:
        Trainer(model, args, rows(13), optimizer=kind(model.parameters(), lr=0.01)).train()
    return str(caught.value)


def warned(kind: Any, folder: str) -> list[str]:
    model = Blocks()
    args = arguments(folder, "fsdp", per_device_train_batch_size=2, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, args, rows(13), optimizer=kind(model.parameters(), lr=0.01)).train()
    return [str(each.message) for each in caught if "draws random" in str(each.message)]


@pytest.mark.distributed
def test_noise_that_all_shards_share_is_a_warning(tmp_path: Any) -> None:
    for messages in on_ranks(2, warned, Noisy, str(tmp_path)):
        assert len(messages) == 1
        assert messages[0].startswith("optimizer=Noisy draws random numbers in its step; with FSDP on a CPU all parts")


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Flat, Scaled])
def test_a_step_that_needs_whole_parameters_is_an_error_that_says_what_to_use(kind: Any, tmp_path: Any) -> None:
    for message in on_ranks(2, refused, kind, str(tmp_path)):
        assert message.startswith(f"optimizer={kind.__name__} cannot step on sharded parameters ("), message
        assert "; use AdamW, Adam or SGD, or strategy=DDP(), under which" in message
        assert "\n" not in message


def steps_of(name: str, strategy: str, batch_size: int, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, weight_decay=0.01, **OPTIONS.get(name, {}))
    args = arguments(folder, strategy, per_device_train_batch_size=batch_size, max_steps=2)
    Trainer(model, args, rows(13), optimizer=optimizer).train()
    assert {each.shape for each in tensors([*optimizer.state.values()])} <= {
        torch.Size(()), *(each.shape for each in model.parameters())
    }  # fmt: skip
    return whole_weights(model)


def steps(strategy: str, batch_size: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    return {name: steps_of(name, strategy, batch_size, folder) for name in sorted(KINDS)}


@pytest.mark.distributed
def test_optimizers_of_torch_step_as_on_one_process(tmp_path: Any) -> None:
    """Each is made before the parameters are sharded."""
    assert {"Adagrad", "AdamW", "NAdam", "RAdam"} < KINDS
    alone, fresh = steps("single", 4, str(tmp_path)), Blocks().state_dict()
    for each in on_ranks(2, steps, "fsdp", 2, str(tmp_path)):
        for name, weights in alone.items():
            torch.testing.assert_close(each[name], weights, rtol=0, atol=1e-12, msg=name)
            assert not torch.equal(weights["head.weight"], fresh["head.weight"])


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_whole_parameters_are_refused(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=f"^{name} .*, which FSDP shards; use AdamW, Adam or SGD"):
        shard_optimizer(optimizer, {})

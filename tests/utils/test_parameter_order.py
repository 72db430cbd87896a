"""Parameters that an optimizer has in another order than in the checkpoint keep their own moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from kit.trainer import arguments
from scenarios.task import Noisy, StopAt
from torch import nn

from trainer_kit import FSDP, Callback, Run, SingleDevice, Trainer
from trainer_kit.checkpoint import read_state
from trainer_kit.utils.optimizer_state import MODEL_NAME, described_groups, optimizer_state
from trainer_kit.utils.parameter_order import add_model_names, follow_order

STEPS = 6


class Alike(nn.Module):
    """Layers whose weights have the same shape, so that only their names tell them apart; two share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x).tanh(), labels)}


def grouped(model: nn.Module, step: int, is_named: bool = False) -> list[dict[str, Any]]:
    """Weights and biases in a group each, in their order or against it."""
    named = [*model.named_parameters()]
    groups = [[each for each in named if each[0].endswith(end)][::step] for end in ("weight", "bias")]
    return [{"params": group if is_named else [value for _, value in group]} for group in groups]


def train(folder: Path, groups: Any = grouped, step: int = 1, stop: int | None = None, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = Alike()
    made = torch.optim.AdamW(groups(model, step))
    args = arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=STEPS, **options.pop("args", {}))
    callbacks = [*options.pop("callbacks", []), *([] if stop is None else [StopAt(stop)])]
    trainer = Trainer(model, args, Noisy(), callbacks=callbacks, optimizer=made, lr_scheduler=constant, **options)
    trainer.train(resume_from_checkpoint=True)
    found = trainer.run.strategy.model_state(trainer.run.model).values()
    return [getattr(value, "full_tensor", lambda value=value: value)().detach().clone() for value in found]


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def assert_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for value, expected in zip(one, other, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


def named(model: nn.Module, step: int) -> list[dict[str, Any]]:
    return grouped(model, step, is_named=True)


@pytest.mark.parametrize("groups", [grouped, named])
def test_a_resume_gives_each_parameter_its_own_moments(tmp_path: Path, groups: Any) -> None:
    straight = train(tmp_path / "straight", groups)
    train(tmp_path / "resumed", groups, stop=3)
    assert_same(train(tmp_path / "resumed", groups, step=-1), straight)


def resume_sharded(folder: str) -> list[torch.Tensor]:
    args = {"per_device_train_batch_size": 4}
    straight = train(Path(folder) / "straight", strategy=FSDP(device="cpu"), args=args)
    train(Path(folder) / "resumed", stop=3, strategy=FSDP(device="cpu"), args=args)
    resumed = train(Path(folder) / "resumed", step=-1, strategy=FSDP(device="cpu"), args=args)
    assert_same(resumed, straight)
    return resumed


class Looks(Callback):
    """Calls the model with gradients right before each save, so that its weights are whole then."""

    def on_step_end(self, run: Run) -> None:
        (parameter,) = {each.device for each in run.model.parameters()}
        run.model(torch.ones(4, 8, device=parameter), torch.zeros(4, dtype=torch.long, device=parameter))


def names_saved(folder: str) -> list[str | None]:
    options = {"strategy": FSDP(device="cpu", reshard_after_forward=False), "callbacks": [Looks()]}
    train(Path(folder), args={"per_device_train_batch_size": 4}, **options)
    state = read_state(Path(folder) / "run" / f"checkpoint-{STEPS}", "optimizer")
    assert state is not None
    return [each.get(MODEL_NAME) for group in described_groups(state) for each in group["params"]]


@pytest.mark.distributed
def test_names_are_found_while_the_weights_are_whole(tmp_path: Path) -> None:
    for names in on_ranks(2, names_saved, str(tmp_path)):
        assert {name.rpartition(".")[2] for name in names if name} == {"weight", "bias"}
        assert None not in names


@pytest.mark.distributed
def test_sharded_parameters_get_their_own_moments(tmp_path: Path) -> None:
    first, second = on_ranks(2, resume_sharded, str(tmp_path))
    assert_same(first, second)


def test_a_parameter_in_another_group_is_refused(tmp_path: Path) -> None:
    def mixed(model: Any, step: int) -> list[dict[str, Any]]:
        *weights, last = (layer.weight for layer in model.layers[:3])
        bias = [layer.bias for layer in model.layers]
        return [{"params": [*weights, bias[0]]}, {"params": [last, *bias[1:]]}]

    train(tmp_path, stop=3)
    message = r"group 0 of the optimizer has 'layers.0.bias' where .*checkpoint-3 has 'layers.2.weight'; resume with"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, mixed)


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    return SingleDevice(device="cpu").parameter_names(model)


def saved_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    state = optimizer_state(optimizer)
    add_model_names(state, optimizer, names_of(model))
    return described_groups(state)


def test_parameters_without_a_name_keep_their_order() -> None:
    model, loss = Alike(), nn.Linear(8, 8, bias=False)
    other = nn.Parameter(torch.zeros(8, 8))
    own = [layer.weight for layer in model.layers[:3]]
    saved = saved_groups(torch.optim.SGD([own[0], other, own[1], loss.weight, own[2]]), nn.DataParallel(model))
    optimizer = torch.optim.SGD([other, own[2], loss.weight, own[0], own[1]])
    follow_order(optimizer, names_of(model), saved, "there")
    order = optimizer.param_groups[0]["params"]
    assert all(one is two for one, two in zip(order, [own[0], other, own[1], loss.weight, own[2]], strict=True))


def test_names_that_the_model_lacks_or_that_were_not_saved_change_nothing() -> None:
    model = Alike()
    optimizer = torch.optim.SGD([*model.parameters()][::-1])
    before = [*optimizer.param_groups[0]["params"]]
    ordinary = torch.optim.SGD(model.parameters())
    for saved in (described_groups(optimizer_state(ordinary)), saved_groups(ordinary, nn.ModuleList([model]))):
        follow_order(optimizer, names_of(model), saved, "there")
        assert all(one is two for one, two in zip(optimizer.param_groups[0]["params"], before, strict=True))


class Inner(torch.optim.SGD):
    """Has an optimizer with groups of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD([each for group in self.param_groups for each in group["params"]])


def test_an_optimizer_of_several_in_another_order_is_refused() -> None:
    model = Alike()
    saved = saved_groups(torch.optim.SGD(model.parameters()), model)
    follow_order(Inner(model.parameters()), names_of(model), saved, "there")
    with pytest.raises(ValueError, match=r"the Inner consists of several optimizers.* than in there; resume with"):
        follow_order(Inner([*model.parameters()][::-1]), names_of(model), saved, "there")

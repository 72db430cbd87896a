"""Parameters without dimensions or elements under FSDP: the weights and gradients of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.block_training import Block, Blocks, arguments, make_trainer, rows, whole_weights
from kit.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainer_kit import FSDP, Callback, Run, Trainer, load_checkpoint_in_model
from trainer_kit.callbacks import Freezing
from trainer_kit.strategies.fsdp.whole_parameters import WholeParameters


class Gated(nn.Module):
    """A block with a gate, whose weights have another name in the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Block(width)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.inner(x)


class Scaled(Blocks):
    """Scalars in blocks, in the model, tied, frozen, in a child that is not called, and an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(6) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.holder = nn.Module()
        self.holder.bias = nn.Parameter(torch.tensor(0.25))
        self.holder.tied = self.temperature
        self.frozen = nn.Parameter(torch.tensor(0.75), requires_grad=False)
        self.calls = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = super().forward(x)
        logits = outputs["logits"] * self.temperature.exp() * self.frozen
        logits = logits + self.holder.bias * self.holder.tied * torch.arange(5)
        logits = logits / self.calls + self.nothing.sum()
        outputs = {"logits": logits}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}


class Clamp(Callback):
    """Bounds the temperature in place, as training scripts of CLIP do."""

    def on_step_end(self, run: Run) -> None:
        with torch.no_grad():
            run.model.temperature.clamp_(0, 1.48)
        run.model.blocks[0].gate.data.mul_(0.99)


def strategy_of(layout: str) -> Any:
    if layout == "hybrid":
        return FSDP(device="cpu", mesh={"replicate": 2, "shard": 2})
    if layout == "tensor":
        plan = {"blocks.*.inner.up": "colwise", "blocks.*.inner.down": "rowwise"}
        return FSDP(device="cpu", mesh={"shard": 2, "tensor": 2}, tensor_parallel=plan)
    return FSDP(device="cpu", reduce_each_batch=layout != "once a step") if layout != "one" else None


def train(folder: str, layout: str, batch_size: int, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    given = {"strategy": strategy_of(layout)} if layout != "one" else {}
    callbacks = [Clamp(), Freezing(["blocks.1.gate"], until_step=2)]
    torch.manual_seed(0)
    trainer = make_trainer(
        folder, "auto", callbacks, Scaled(), given=given, per_device_train_batch_size=batch_size,
        max_grad_norm=0.05, **options,
    )  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/{layout}")
    return whole_weights(trainer.run.model), loss


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("shards", {}),
        ("shards", {"gradient_checkpointing": True}),
        ("once a step", {}),
        ("hybrid", {}),
        ("tensor", {}),
        ("tensor", {"gradient_checkpointing": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value) or None,
)
def test_weights_are_those_of_one_process(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    expected, theirs = train(str(tmp_path), "one", 4)
    processes, batch_size = {"hybrid": (4, 1), "tensor": (4, 2)}.get(layout, (2, 2))
    for weights, loss in on_ranks(processes, train, str(tmp_path), layout, batch_size, **options):
        assert loss == pytest.approx(theirs, abs=1e-12)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    assert float(expected["temperature"]) <= 1.48
    assert float(expected["blocks.1.gate"]) != 0.5
    loaded = Scaled()
    load_checkpoint_in_model(loaded, tmp_path / layout)
    torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=1e-12)


def resume(folder: str, layout: str, batch_size: int, until: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(until)  # weights come from the checkpoint
    model = Scaled()
    options = {"per_device_train_batch_size": batch_size, "save_strategy": "steps", "save_steps": 1}
    args = arguments(folder, "auto", max_steps=until, lr_scheduler_type="constant", **options)
    trainer = Trainer(model, args, rows(13), **({"strategy": strategy_of(layout)} if layout != "one" else {}))
    trainer.train(resume_from_checkpoint=until > 2)
    return whole_weights(trainer.run.model)


@pytest.mark.distributed
def test_any_layout_resumes(tmp_path: Path) -> None:
    resume(str(tmp_path / "straight"), "one", 4, 2)
    expected = resume(str(tmp_path / "straight"), "one", 4, 6)
    on_ranks(2, resume, str(tmp_path / "runs"), "shards", 2, 2)
    on_ranks(4, resume, str(tmp_path / "runs"), "hybrid", 1, 3)
    resume(str(tmp_path / "runs"), "one", 4, 4)
    for weights in on_ranks(4, resume, str(tmp_path / "runs"), "tensor", 2, 6):
        torch.testing.assert_close(weights, {**expected}, rtol=0, atol=1e-12)


def given_other_data(folder: str) -> str:
    class Replaces(Callback):
        def on_step_end(self, run: Run) -> None:
            run.model.holder.bias.data = torch.tensor(0.5).double()

    trainer = make_trainer(folder, "fsdp", [Replaces()], Scaled())
    with pytest.raises(ValueError, match="given other data") as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.distributed
def test_other_data_in_its_place_is_an_error(tmp_path: Path) -> None:
    sentence = "'holder.bias' was given other data; change it in place: holder.bias.data.copy_(value)"
    assert on_ranks(2, given_other_data, str(tmp_path)) == [sentence, sentence]


def seen_by_the_model() -> dict[str, bool]:
    strategy = FSDP(device="cpu")
    strategy.setup()
    model = strategy.prepare(Scaled())
    named = dict(model.named_parameters())
    sentence = re.escape("'gate' has no dimensions or no elements, so FSDP(offload=True) cannot move it; make it of")
    elsewhere = WholeParameters(Gated(2), init_device_mesh("cpu", (2,)), []).aside(torch.device("meta"))
    with pytest.raises(ValueError, match=sentence), elsewhere:
        pass
    found = {
        "order": [*named] == [name for name, _ in Scaled().named_parameters()],
        "replicated": all(isinstance(each, DTensor) for each in named.values()),
        "plain": type(model.temperature) is nn.Parameter and not isinstance(model.temperature, DTensor),
        "tied": model.holder.tied is model.temperature,
        "trained": model.temperature.requires_grad and not model.frozen.requires_grad,
    }
    (model.temperature * 2).backward()  # outside of a forward pass
    found["summed"] = float(named["temperature"].grad.to_local()) == 4
    found["unused"] = named["holder.bias"].grad is None
    optimizer = strategy.prepare_optimizer(torch.optim.SGD([model.temperature], lr=1.0))
    found["optimized"] = optimizer.param_groups[0]["params"][0] is named["temperature"]
    model.temperature.requires_grad_(False)
    model(torch.ones(1, 4).double())
    found["frozen by attribute"] = not named["temperature"].requires_grad
    named["temperature"].requires_grad_()
    model(torch.ones(1, 4).double())
    found["trained by name"] = model.temperature.requires_grad
    model.temperature.grad = torch.tensor(3.0).double()  # as of a backward pass that has failed
    seen: list[torch.Tensor] = []
    named["temperature"].grad = None
    named["temperature"].register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.to_local().clone()))
    logits = model(torch.ones(1, 4).double())["logits"]
    found["no old gradient"] = model.temperature.grad is None
    (logits.sum() * 0 + model.temperature).backward()
    found["hooks"] = [float(each) for each in seen] == [2.0]
    strategy.teardown()
    return found


@pytest.mark.distributed
def test_the_model_has_plain_tensors_in_their_place() -> None:
    for found in on_ranks(2, seen_by_the_model):
        assert all(found.values()), found


class Sometimes(Blocks):
    """Uses its parameter without dimensions on one process only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(x)["logits"]
        if torch.distributed.get_rank() == 1:
            logits = logits * self.scale
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def used_by_one_process(folder: str) -> str:
    trainer = make_trainer(folder, "fsdp", [], Sometimes())
    with pytest.raises(ValueError, match="on some processes only") as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.distributed
def test_one_that_a_single_process_uses_is_an_error(tmp_path: Path) -> None:
    for message in on_ranks(2, used_by_one_process, str(tmp_path)):
        assert message.startswith("'scale' had a part in the loss on some processes only (rank 0 and rank 1 differ)")

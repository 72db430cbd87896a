"""A recomputation begins with what the forward pass began with; where it differs all the same, it is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer_kit.config.checkpointing_options import CheckpointingOptions
from trainer_kit.strategies.activation_checkpointing import checkpoint_modules
from trainer_kit.strategies.base import Strategy

WIDTH = 4
POLICIES = ["all", "save_matmuls"]


class Block(nn.Module):
    """Two layers, and something between them that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            change = self.change(hidden)
        output: torch.Tensor = torch.sigmoid(self.second(hidden * change))
        return output

    def change(self, hidden: torch.Tensor) -> Any:
        raise NotImplementedError


class Net(nn.Module):
    """Blocks one after the other."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(model: nn.Module, policy: str | None, steps: int = 5) -> dict[str, torch.Tensor]:
    """Parameters and buffers after some steps."""
    model = copy.deepcopy(model)
    if policy is not None:
        checkpoint_modules(model, CheckpointingOptions(policy=policy))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        model(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


# What it begins with


class ThroughData(Block):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def change(self, hidden: torch.Tensor) -> Any:
        self.mean.data.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return 1 - self.mean


class OtherNames(Block):
    def prepare(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))

    def change(self, hidden: torch.Tensor) -> Any:
        return nn.functional.batch_norm(hidden, self.average, self.spread, training=True)


class TwoNames(Block):
    def prepare(self) -> None:
        self.register_buffer("one", torch.zeros(WIDTH))
        self.register_buffer("other", self.one)

    def change(self, hidden: torch.Tensor) -> Any:
        self.one.mul_(0.9).add_(hidden.mean(0))
        return 1 - self.other


class Cache(Block):
    """Grows with what it is used for."""

    def prepare(self) -> None:
        self.rows = 0
        self.register_buffer("angles", None)

    def change(self, hidden: torch.Tensor) -> Any:
        if len(hidden) > self.rows:
            self.rows = len(hidden)
            self.angles = torch.arange(self.rows)[:, None] / 10
        return self.angles


class Python(Block):
    def change(self, hidden: torch.Tensor) -> Any:
        return 2.0 if random.random() < 0.5 else 1.0


class Numpy(Block):
    def change(self, hidden: torch.Tensor) -> Any:
        return torch.from_numpy(np.random.rand(WIDTH)).float()


class Torch(Block):
    def change(self, hidden: torch.Tensor) -> Any:
        return nn.functional.dropout(torch.ones_like(hidden))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [ThroughData, OtherNames, TwoNames, Cache, Python, Numpy, Torch])
def test_buffers_and_random_numbers_are_those_of_the_forward_pass(kind: type[Block], policy: str) -> None:
    model = Net(kind)
    plain, checkpointed = trained(model, None), trained(model, policy)
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, rtol=0, atol=0)


# What is refused


class NoneAtFirst(Block):
    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def change(self, hidden: torch.Tensor) -> Any:
        mean = hidden.mean(0)
        self.mean = mean if self.mean is None else self.mean * 0.5 + mean
        return 1 - self.mean


class Counter(Block):
    def prepare(self) -> None:
        self.calls = 0

    def change(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return min(1.0, self.calls / 6)


class Attribute(Block):
    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def change(self, hidden: torch.Tensor) -> Any:
        self.mean = self.mean * 0.9 + hidden.mean(0)
        return 1 - self.mean


class Weight(Block):
    def prepare(self) -> None:
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def change(self, hidden: torch.Tensor) -> Any:
        self.mean.mul_(0.9).add_(hidden.mean(0))
        return 1 - self.mean


class OwnGenerator(Block):
    def change(self, hidden: torch.Tensor) -> Any:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(0)
        return torch.rand(WIDTH, generator=self.generator)


class Hidden(OwnGenerator):
    """The result of what differs is multiplied by zero at first, as a branch that begins with nothing."""

    def prepare(self) -> None:
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * super().forward(x)


class Dense(Net):
    """Each block gets a list, which grows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for block in self.blocks:
            found.append(block(found))
        return torch.stack(found).sum(0)


class OfList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, found: list[torch.Tensor]) -> torch.Tensor:
        return torch.sigmoid(self.layer(torch.stack(found).mean(0)))


class OtherWeights(Net):
    """Calls its blocks with other weights than theirs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            half = {name: weight / 2 for name, weight in block.named_parameters()}
            x = torch.func.functional_call(block, half, (x,))
        return x


class Twice(Net):
    """Calls its blocks twice, each with another weight, which a hook sets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


def spectral() -> nn.Module:
    layer: nn.Module = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return layer


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "model",
    [
        *map(Net, (NoneAtFirst, Counter, Attribute, Weight, OwnGenerator, Hidden)),
        Dense(OfList), OtherWeights(layers), Twice(spectral),
    ],
    ids=lambda model: f"{type(model).__name__}-{type(model.blocks[0]).__name__}",
)  # fmt: skip
def test_what_gives_other_values_is_refused(model: nn.Module, policy: str) -> None:
    name = type(model.blocks[-1]).__name__  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=rf"computes a {name} again .* differs from the forward pass .* leave it out"):
        trained(model, policy)


def test_a_kept_result_that_is_changed_unseen_is_refused() -> None:
    """Parts of a tensor that torch takes apart on the CPU count their changes on their own."""
    model = Net(lambda: nn.GRUCell(WIDTH, WIDTH))
    plain, checkpointed = trained(model, None), trained(model, "all")
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"computes a GRUCell again .* with policy='save_matmuls', a kept result"):
        trained(model, "save_matmuls")


class Unused(nn.Module):
    """Computes what its parent keeps for later passes, or drops."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return hidden * self.calls


class Lazy(Block):
    def prepare(self) -> None:
        self.part = Unused()
        self.kept: Any = None

    def change(self, hidden: torch.Tensor) -> Any:
        if self.kept is None:
            self.kept = self.part(torch.ones(WIDTH))
        self.part(hidden)
        return self.kept


class Sparse(Block):
    def prepare(self) -> None:
        self.register_buffer("graph", torch.eye(6).to_sparse())

    def change(self, hidden: torch.Tensor) -> Any:
        return self.graph @ hidden


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Lazy, Sparse])
def test_what_has_no_part_in_the_gradients_may_differ(kind: type[Block], policy: str) -> None:
    model = Net(kind)
    plain, checkpointed = trained(model, None), trained(model, policy)
    for name, value in plain.items():
        if not value.is_sparse:
            torch.testing.assert_close(checkpointed[name], value, rtol=0, atol=0)


def test_a_second_backward_pass_that_torch_refuses_leaves_nothing_behind() -> None:
    model = Net(ThroughData)
    checkpoint_modules(model, CheckpointingOptions(policy="save_matmuls"))
    loss = model(torch.randn(6, WIDTH)).sum()
    loss.backward(retain_graph=True)
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == before


# What it costs


@pytest.mark.parametrize("policy", POLICIES)
def test_only_the_first_recomputations_are_compared(policy: str) -> None:
    model = Net(layers)
    checkpoint_modules(model, CheckpointingOptions(policy=policy))  # type: ignore[arg-type]
    left = []
    for _ in range(5):
        model(torch.randn(6, WIDTH)).sum().backward()
        left.append([block.forward._recomputation.left for block in model.blocks])  # type: ignore[union-attr]
    assert left == [[2] * 3, [1] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler
def test_what_a_block_compiles_by_itself_is_compiled() -> None:
    torch.compiler.reset()
    inner = torch.compile(lambda x: torch.sin(x) * 2, backend="aot_eager")

    class Compiled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.second(inner(self.first(x)))
            return output

    before = Strategy().device_info.compilations()[0]
    trained(Net(Compiled), "all")
    assert Strategy().device_info.compilations()[0] > before
    torch.compiler.reset()

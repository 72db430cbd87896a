"""Gradient buckets: a resumed run sums gradients in the same order as a run that was never stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.branches import quiet
from kit.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from trainer_kit import Trainer
from trainer_kit.callbacks import Freezing
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.ddp_buckets import FixedBuckets

STEPS, STOPS = 6, (1, 4)
ROWS, WIDTH = 256, 192


class Layers(nn.Module):
    """Layers that fill several buckets of 1 MiB, used in the order of registration."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(ROWS, WIDTH, sparse=self.sparse)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
        self.head = nn.Linear(WIDTH, 1)

    def used(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """Return the layers in the order of use."""
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.used():
            hidden = hidden + 0.1 * torch.tanh(layer(hidden))
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]


class LastLayerFirst(Layers):
    def used(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return list(reversed(self.layers))


class OrderOfBatch(Layers):
    """Layers whose order differs between batches, and processes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = int(x.sum()) % len(self.layers)
        return super().forward(x)

    def used(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return [*self.layers[self.start :], *self.layers[: self.start]]


class SeveralDtypes(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3:9].double()
        self.layers[12:15].bfloat16()

    def used(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return [functools.partial(in_dtype, layer) for layer in self.layers]


def in_dtype(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden.to(layer.weight.dtype)).float()  # type: ignore[no-any-return]


class SparseGradients(Layers):
    sparse = True


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randint(0, ROWS, (8,), generator=generator)} for _ in range(48)]


def frozen_for_a_while() -> list[Freezing]:
    return [Freezing("embedding.*", until_step=2), Freezing("layers.1?.*", from_step=3, until_step=5)]


def train(
    folder: Path, stop: int, model: type[nn.Module], options: dict[str, Any], arguments: dict[str, Any], freezes: bool
) -> list[torch.Tensor]:
    """Train up to a step, from the newest checkpoint; return the weights and the optimizer's state."""
    arguments = {"optim": "adamw_torch", "lr_scheduler_type": "constant", "save_steps": stop} | arguments
    args = quiet(str(folder), max_steps=stop, save_strategy="no" if stop == STEPS else "steps", **arguments)
    strategy = DDP(device="cpu", bucket_cap_mb=1, **options)
    callbacks = frozen_for_a_while() if freezes else []
    trainer = Trainer(model(), args, rows(), strategy=strategy, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=folder.exists())
    moments = [value for each in trainer.run.optimizer.state_dict()["state"].values() for value in each.values()]
    return [tensor.clone() for tensor in (*trainer.run.model.state_dict().values(), *moments) if tensor is not None]


def train_stopped_and_not(folder: str, *given: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    for stop in (*STOPS, STEPS):
        stopped = train(Path(folder) / "stopped", stop, *given)
    return stopped, train(Path(folder) / "undisturbed", STEPS, *given)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "options", "arguments", "freezes"),
    [
        pytest.param(Layers, {}, {}, False, id="plain"),
        pytest.param(Layers, {}, {}, True, id="frozen for a while"),
        pytest.param(LastLayerFirst, {}, {}, False, id="last layer first"),
        pytest.param(OrderOfBatch, {}, {}, True, id="order of batch"),
        pytest.param(SeveralDtypes, {}, {}, False, id="several dtypes"),
        pytest.param(SparseGradients, {}, {"optim": "sgd"}, False, id="sparse gradients"),
        pytest.param(Layers, {"gradient_as_bucket_view": False}, {}, False, id="copied gradients"),
        pytest.param(Layers, {"static_graph": True}, {"gradient_accumulation_steps": 2}, True, id="static graph"),
        pytest.param(
            Layers,
            {"static_graph": True, "find_unused_parameters": True},
            {},
            False,
            id="static graph, unused parameters",
        ),
        pytest.param(Layers, {"gradient_compression": "bf16"}, {}, False, id="compressed gradients"),
        pytest.param(LastLayerFirst, {"find_unused_parameters": True}, {}, True, id="unused parameters"),
        pytest.param(Layers, {}, {"gradient_accumulation_steps": 2}, True, id="accumulation"),
        pytest.param(Layers, {}, {"mixed_precision": "fp16"}, False, id="fp16"),
    ],
)
def test_a_resumed_run_has_the_same_bits(
    tmp_path: Path, model: type[nn.Module], options: dict[str, Any], arguments: dict[str, Any], freezes: bool
) -> None:
    """Freezing divides the parameters again, also one step before the second stop."""
    for stopped, undisturbed in on_ranks(3, train_stopped_and_not, str(tmp_path), model, options, arguments, freezes):
        assert len(stopped) == len(undisturbed)
        assert [number for number, one in enumerate(stopped) if not one.equal(undisturbed[number])] == []


def buckets_sent(**options: Any) -> list[list[str]]:
    """Return the names of the parameters in each bucket that three backward passes send."""
    strategy = DDP(device="cpu")
    strategy.setup()
    model = LastLayerFirst()
    wrapped = FixedBuckets(model, bucket_cap_mb=1, **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    buckets = []

    def record(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append([names[parameter] for parameter in bucket.parameters()])
        return allreduce_hook(dist.group.WORLD, bucket)

    wrapped.register_comm_hook(None, lambda state, bucket: record(bucket))
    for _ in range(3):
        wrapped(torch.tensor([1])).backward()
    return buckets


@pytest.mark.distributed
def test_buckets_hold_parameters_in_reverse_order_of_registration() -> None:
    registered = [name for name, _ in Layers().named_parameters()]
    for buckets in on_ranks(2, buckets_sent):
        count = len(buckets) // 3
        assert count > 2
        assert buckets == buckets[:count] * 3
        assert [name for bucket in buckets[:count] for name in bucket] == registered[::-1]


@pytest.mark.distributed
def test_buckets_follow_torch_if_it_divides_once() -> None:
    """The last layers' bucket comes first."""
    for buckets in on_ranks(2, buckets_sent, find_unused_parameters=True):
        count = len(buckets) // 3
        assert count > 2
        assert buckets == buckets[:count] * 3
        assert "head.weight" in buckets[0]
        assert "embedding.weight" in buckets[count - 1]

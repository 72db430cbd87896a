"""Estimates of a model that is sharded over processes, compared with sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import on_ranks
from kit.sized_models import gpt2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer_kit import TrainingArguments
from trainer_kit.memory import Anatomy, advise, estimate
from trainer_kit.memory.measuring import peak_on_cpu
from trainer_kit.memory.sharding import Sharding
from trainer_kit.memory.tracker import Tracker
from trainer_kit.strategies.fsdp.units import find_units

BLOCK = 4 * (8 * 8 + 8)
HEAD = 4 * (2 * 8 + 2)
BATCH = {"x": torch.ones(1, 8), "labels": torch.zeros(1, dtype=torch.int64)}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Blocks(nn.Module):
    """Blocks and a head, which is the root unit."""

    def __init__(self, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.blocks(x)), labels)}


def arguments(**given: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, **{"optim": "sgd", "optim_args": "momentum=0.9", **given})


def sizes(anatomy: Anatomy) -> dict[str, int]:
    return {component.name: component.nbytes for component in anatomy.components}


@pytest.mark.parametrize(
    ("shards", "part"),
    [
        (2, (4 * BLOCK + HEAD) // 2),
        (4, 4 * (64 + 8) + 16 + 2),
        (3, 4 * (86 + 11) + 22 + 3),  # each tensor's part rounded up
    ],
)
def test_each_process_holds_its_part_and_what_is_gathered(shards: int, part: int) -> None:
    whole, found = (estimate(Blocks(), arguments(), BATCH, fsdp=each) for each in (1, shards))
    expected = dict.fromkeys(("weights", "gradients", "optimizer"), part)
    assert {name: found.nbytes(name) for name in expected} == expected
    assert found.nbytes("gathered") == HEAD + 3 * BLOCK
    assert found.peak == sum(sizes(found).values())
    assert found.shards == shards
    assert (found.parameters, found.model_flops) == (whole.parameters, whole.model_flops)
    assert f"on cpu, sharded over {shards} processes," in found.table()


def test_activations_and_batch_are_those_of_one_process() -> None:
    batch = {"x": torch.ones(256, 8), "labels": torch.zeros(256, dtype=torch.int64)}
    whole, found = (estimate(Blocks(), arguments(), batch, fsdp=each) for each in (1, 4))
    assert whole.nbytes("activations") >= 4 * 256 * 8 * 4  # the result of each block
    for name in ("activations", "batch", "temporary"):
        assert found.nbytes(name) == whole.nbytes(name)
    assert whole.nbytes("gathered") == 0


def test_bf16_gathers_half_and_casts_nothing() -> None:
    batch = {"x": torch.ones(256, 8), "labels": torch.zeros(256, dtype=torch.int64)}
    args = arguments(mixed_precision="bf16")
    whole, found = (estimate(Blocks(), args, batch, fsdp=each) for each in (1, 2))
    assert found.nbytes("gathered") == (HEAD + 3 * BLOCK) // 2
    assert found.nbytes("weights") == (4 * BLOCK + HEAD) // 2
    assert whole.nbytes("casts") > 0
    assert found.nbytes("casts") == 0


def test_a_forward_pass_of_a_sharded_model() -> None:
    found = estimate(Blocks(), arguments(), BATCH, fsdp=2, inference=True)
    assert (found.nbytes("weights"), found.nbytes("gathered")) == ((4 * BLOCK + HEAD) // 2, HEAD + 3 * BLOCK)
    assert found.nbytes("gradients") == found.nbytes("optimizer") == 0


def test_a_model_without_units_is_gathered_as_one() -> None:
    model, batch = nn.Linear(8, 8), torch.ones(2, 8)
    found = estimate(model, arguments(), batch, compute_loss=lambda model, batch: model(batch).sum(), fsdp=2)
    assert found.nbytes("gathered") == BLOCK


def test_a_tied_embedding_is_in_the_root_unit() -> None:
    model, batch = gpt2()
    found = estimate(model, arguments(gradient_checkpointing=True, gradient_accumulation_steps=2), batch, fsdp=2)
    layer = sum(each.nbytes for each in model.transformer.h[0].parameters())
    total = sum(each.nbytes for each in model.parameters())
    assert found.nbytes("gathered") == total - 2 * layer + 3 * layer
    assert found.nbytes("weights") == total // 2


def test_replicas_take_no_buckets() -> None:
    expected = estimate(Blocks(), arguments(), BATCH, fsdp=2)
    assert sizes(estimate(Blocks(), arguments(), BATCH, world_size=4, fsdp=2)) == sizes(expected)
    assert advise(Blocks(), arguments(), BATCH, fsdp=2).anatomy == expected


def test_an_update_works_on_parts_and_after_what_is_gathered() -> None:
    for numbers, expected in ((1000, {"temporary": 256, "gathered": 1000}), (1001, {"temporary": 256 + 1001})):
        tracker = Tracker(sharding=Sharding(4, 1000))
        with tracker.following():
            kept = torch.empty(64)
            tracker.begin_update()
            temporary = torch.empty(numbers)  # of 4 bytes, on 4 processes
        assert tracker.peak() == expected
        del kept, temporary


def test_the_peak_may_be_in_the_update() -> None:
    args = arguments(optim="adamw_torch", optim_args=None)  # on a GPU it has temporary copies of all weights at once
    whole, found = (estimate(Blocks(20), args, BATCH, device="cuda", fsdp=each) for each in (1, 2))
    assert found.nbytes("gathered") == 0
    for name in ("weights", "gradients", "optimizer"):
        assert found.nbytes(name) == whole.nbytes(name) / 2
    assert found.nbytes("temporary") == pytest.approx(whole.nbytes("temporary") / 2, rel=0.05)


class ShardedStep:
    """A step of torch's own engine."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in find_units(model):
            fully_shard(unit.module, mesh=mesh)
        self.model, self.batch = fully_shard(model, mesh=mesh), batch
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    def __call__(self) -> None:
        self.model(**self.batch)["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> dict[str, list[torch.Tensor]]:
        states = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return {
            "shards": [each.to_local() for each in (*self.model.parameters(), *states)],
            "batch": [*self.batch.values()],
        }


def estimated_and_measured(samples: int) -> tuple[int, int]:
    model = Blocks(8, 512)
    batch = {"x": torch.ones(samples, 512), "labels": torch.zeros(samples, dtype=torch.int64)}
    estimated = estimate(model, arguments(max_grad_norm=0.0), batch, fsdp=2)
    dist.init_process_group("gloo")
    step = ShardedStep(model, batch)
    step()  # which allocates the optimizer's state
    # gloo's threads may release a sent buffer after the next unit is gathered: least of several steps.
    return estimated.peak, min(peak_on_cpu(step) for _ in range(5))


@pytest.mark.distributed
@pytest.mark.parametrize("samples", [8, 512])  # peaks at the end and at the beginning of the backward pass
def test_the_peak_is_that_of_a_real_step(samples: int) -> None:
    for estimated, measured in on_ranks(2, estimated_and_measured, samples):
        assert estimated == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("given", "shards", "world_size", "sentence"),
    [
        ({}, 3, 4, "fsdp=3 must divide the number of processes, 4"),
        ({}, 4, 2, "fsdp=4 must divide the number of processes, 2"),
        ({}, 0, 1, "fsdp=0 must be at least 1"),
        ({"mixed_precision": "fp16"}, 2, 1, "mixed_precision='fp16' is not possible with fsdp; use 'bf16' or 'no'"),
        ({"mixed_precision": "fp8"}, 2, 1, "mixed_precision='fp8' is not possible with fsdp; use 'bf16' or 'no'"),
        ({"optim": "adafactor", "optim_args": None}, 2, 1, "optim='adafactor' is not possible with fsdp; use"),
        ({"optim": "muon", "optim_args": None}, 2, 1, "optim='muon' is not possible with fsdp; use"),
    ],
)
def test_what_cannot_be_sharded(given: dict[str, Any], shards: int, world_size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        estimate(Blocks(), arguments(**given), BATCH, fsdp=shards, world_size=world_size)


def test_a_parameter_that_cannot_be_sharded() -> None:
    model = Blocks()
    model.scale = nn.Parameter(torch.ones(2).to_sparse())
    with pytest.raises(ValueError, match="'scale' is sparse"):
        estimate(model, arguments(), BATCH, fsdp=2)

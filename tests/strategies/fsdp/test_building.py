"""A model that was made on the device "meta" and sharded: each value is that of a model made whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.boxes import cut
from kit.ranks import on_ranks
from kit.sharded import FAMILIES, family, placement, shard, whole
from torch import nn

from trainer_kit.checkpoint import save_tensors, take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.checkpoint.optimizer_states import read_optimizer_state
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.building import check_complete, refill_buffers
from trainer_kit.strategies.fsdp.placement import fill_from_main
from trainer_kit.utils.box import Box
from trainer_kit.utils.optimizer_state import load_optimizer_state, optimizer_state


def buffers_without_file(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers() if name not in model.state_dict()]


def refilled() -> dict[str, list[str]]:
    """By family, the buffers that were filled; each is compared with that of a model made on the CPU."""
    strategy = DDP(device="cpu")
    strategy.setup()
    found = {}
    for kind in FAMILIES:
        with torch.device("meta"):
            model = family(kind)
        shard(model).to_empty(device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.detach().fill_(7)
        names = found[kind] = buffers_without_file(model)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        refill_buffers(model, names)
        assert torch.equal(torch.get_rng_state(), before)
        made = family(kind)
        for name in names:
            assert torch.equal(model.get_buffer(name), made.get_buffer(name)), name
            assert model.get_buffer(name).dtype == made.get_buffer(name).dtype
        assert all((parameter.to_local() == 7).all() for parameter in model.parameters())  # type: ignore[operator]
        check_complete(model)
    return found


@pytest.mark.distributed
def test_buffers_that_no_file_has_are_those_of_a_model_made_on_the_cpu() -> None:
    first, second = on_ranks(2, refilled)
    assert first == second
    assert first["llama"] == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    assert {kind for kind, names in first.items() if names} >= {"llama", "qwen3", "bert", "modernbert", "mixtral"}


class Reset(nn.Module):
    def __init__(self, kind: str = "right") -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("angles", torch.arange(4.0) / 3, persistent=False)
        self.register_buffer("count", torch.tensor(5))

    def reset_buffers(self) -> None:
        self.count = torch.tensor(0)
        if self.kind == "right":
            self.register_buffer("angles", torch.arange(4.0) / 3, persistent=False)
        if self.kind == "another shape":
            self.angles = torch.arange(8.0) / 3
        if self.kind == "half":
            self.angles[:2] = 1


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0) / 3, persistent=False)


def test_the_owners_method_fills_its_buffers_and_leaves_loaded_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Reset())
    model[1].angles.fill_(7)
    assert refill_buffers(model, ["1.angles"]) == {"1.angles"}
    assert torch.equal(model[1].angles, torch.arange(4.0) / 3)
    assert model[1].count == 5


@pytest.mark.parametrize("owner", [Without(), Reset("nothing"), Reset("half"), Reset("another shape")])
def test_a_buffer_to_which_no_code_gives_a_value(owner: nn.Module) -> None:
    assert refill_buffers(nn.Sequential(owner), ["0.angles"]) == set()


def alike(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def received(rows: int, replicas: int = 1) -> list[torch.Tensor]:
    strategy = DDP(device="cpu")
    strategy.setup()
    model = shard(nn.Linear(3, rows), replicas=replicas)
    plain = torch.zeros(3, dtype=torch.bool)
    values = {"weight": torch.arange(3.0 * rows).view(rows, 3), "plain": torch.tensor([True, False, True])}
    fill_from_main({"weight": model.weight, "plain": plain}, values if strategy.is_main else {})
    return [model.weight.detach().to_local(), plain]


@pytest.mark.distributed
@pytest.mark.parametrize("rows", [5, 1])
def test_each_process_keeps_its_rows_of_what_the_main_one_sends(rows: int) -> None:
    first, second = on_ranks(2, received, rows)
    assert first[0].shape[0] > second[0].shape[0]
    assert torch.equal(torch.cat([first[0], second[0]]), torch.arange(3.0 * rows).view(rows, 3))
    assert first[1].tolist() == second[1].tolist() == [True, False, True]


@pytest.mark.slow
@pytest.mark.distributed
def test_each_replica_gets_the_rows_of_what_the_main_process_sends() -> None:
    parts = [part for part, _ in on_ranks(4, received, 5, replicas=2)]
    for first, second in (parts[:2], parts[2:]):
        assert torch.equal(torch.cat([first, second]), torch.arange(15.0).view(5, 3))


def test_what_is_left_on_meta_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_complete(model)
    model[0].weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    model[1].scale = torch.ones(2, device="meta")
    model[1].running_mean = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match=r"^'0.weight', '1.running_mean' and '1.scale' of Sequential have no value"):
        check_complete(model)


def built(folder: Path, expected: Any) -> int:
    """Builds a Llama from a folder on this rank; the bytes of weights that it holds."""
    strategy = DDP(device="cpu")
    strategy.setup()
    with torch.device("meta"):
        model = family("llama")
    names = buffers_without_file(model)
    shard(model).to_empty(device="cpu")
    load_weights(model, folder, is_verified=False, placement=placement)
    refill_buffers(model, names)
    check_complete(model)
    held = sum(part[0].nbytes for parameter in model.parameters() if (part := placement(parameter)) is not None)
    torch.testing.assert_close(model(torch.arange(8)[None]).logits, expected, rtol=0, atol=1e-6)
    return held


@pytest.mark.distributed
def test_a_model_built_from_a_folder_computes_what_the_saved_one_does(tmp_path: Path) -> None:
    model = family("llama")
    save_tensors(model.state_dict(), tmp_path)
    expected = model(torch.arange(8)[None]).logits.detach()
    held = on_ranks(2, built, tmp_path, expected)
    assert sum(held) == sum(parameter.nbytes for parameter in model.parameters())
    assert max(held) < 0.6 * sum(held)


class Sums(torch.optim.Optimizer):
    """Keeps a float32 sum of bfloat16 gradients, as torch's own load_state_dict does not."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = state.get("sum", 0) + parameter.grad.float() * 1.001
            parameter.add_(state["sum"].to(parameter.dtype), alpha=-0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        gradient = torch.linspace(-1, 1 + number, parameter.numel()).view(parameter.shape).to(parameter.dtype)
        parameter.grad = torch.zeros_like(parameter)
        part = placement(parameter.grad)
        local, box = part if part is not None else (parameter.grad, Box.whole(tuple(parameter.shape)))
        local.copy_(cut(gradient, box))
    optimizer.step()


def tiny(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype)


def resumed(folder: Path, make: Any, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Weights and state after one more step on this rank, both whole."""
    strategy = DDP(device="cpu")
    strategy.setup()
    with torch.device("meta"):
        model = tiny(dtype)
    shard(model).to_empty(device="cpu")
    optimizer = make(model.parameters())
    load_weights(model, folder, is_verified=True, placement=placement)
    state = read_optimizer_state(folder, "optimizer", optimizer, strategy.parameter_names(model), placement)
    assert state is not None
    load_optimizer_state(optimizer, state)
    stepped(model, optimizer)
    state = [whole(value) for each in optimizer.state.values() for value in each.values()]
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}, state


@pytest.mark.distributed
@pytest.mark.parametrize(("make", "dtype"), [(adamw, torch.float32), (Sums, torch.bfloat16)])
def test_the_checkpoint_of_one_process_is_resumed_on_two(tmp_path: Path, make: Any, dtype: torch.dtype) -> None:
    model = tiny(dtype)
    optimizer = make(model.parameters())
    stepped(model, optimizer)
    states = {"optimizer": optimizer_state(optimizer), "trainer": {"lr_scheduler": "NoneType"}}
    folder = write_checkpoint(tmp_path, take_snapshot(1, model.state_dict(), states, arguments={}), max_shard_size=40)
    stepped(model, optimizer)
    expected = [value for each in optimizer.state.values() for value in each.values()]
    for weights, state in on_ranks(2, resumed, folder, make, dtype):
        assert alike(weights, dict(model.state_dict()))
        assert all(
            torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(state, expected, strict=True)
        )

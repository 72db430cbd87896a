"""What a rank allocator of AdaLoRA knows is saved once there is any, and comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainer_kit.checkpoint.rank_allocators import is_rank_allocator, set_state_of_allocator, state_of_allocator


class RankAllocator:
    """As in peft."""

    def __init__(self) -> None:
        self.peft_config = SimpleNamespace(rank_pattern=None)
        self.ipt: dict[str, torch.Tensor] = {}
        self.exp_avg_ipt: dict[str, torch.Tensor] = {}
        self.exp_avg_unc: dict[str, torch.Tensor] = {}


def test_a_rank_allocator_is_known_by_its_name_and_averages() -> None:
    class Other(RankAllocator):
        pass

    without: Any = type("RankAllocator", (), {})()
    assert is_rank_allocator(RankAllocator())
    assert not any(map(is_rank_allocator, (Other(), without, None)))


def test_a_new_one_has_no_state() -> None:
    assert state_of_allocator(RankAllocator()) == {}


def test_its_state_comes_back() -> None:
    allocator, other = RankAllocator(), RankAllocator()
    allocator.exp_avg_ipt, allocator.exp_avg_unc = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
    allocator.peft_config.rank_pattern = {"a": [True, False]}
    set_state_of_allocator(other, state_of_allocator(allocator), torch.device("cpu"))
    assert other.peft_config.rank_pattern == {"a": [True, False]}
    assert other.ipt.keys() == {"a"}
    assert torch.equal(other.exp_avg_ipt["a"], torch.ones(2))
    assert torch.equal(other.exp_avg_unc["a"], torch.zeros(2))


def test_a_new_one_is_new_again() -> None:
    allocator = RankAllocator()
    allocator.exp_avg_unc, allocator.peft_config.rank_pattern = {"a": torch.ones(2)}, {"a": [True]}
    set_state_of_allocator(allocator, {}, torch.device("cpu"))
    assert state_of_allocator(allocator) == {}
    assert allocator.peft_config.rank_pattern is None


def test_the_averages_are_dropped_where_the_saved_one_has_none() -> None:
    allocator = RankAllocator()
    allocator.exp_avg_ipt = {"a": torch.ones(2)}
    set_state_of_allocator(allocator, {"rank_pattern": {"a": [True]}}, torch.device("cpu"))
    assert allocator.exp_avg_ipt == allocator.exp_avg_unc == allocator.ipt == {}

"""The rank allocators of peft's AdaLoRA: what they know of the importance of each rank is in no tensor of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_AVERAGES = ("exp_avg_ipt", "exp_avg_unc")


def is_rank_allocator(value: Any) -> bool:
    """Return whether an object is a rank allocator."""
    return type(value).__name__ == "RankAllocator" and all(
        isinstance(getattr(value, each, 0), dict) for each in _AVERAGES
    )


def state_of_allocator(allocator: Any) -> dict[str, Any]:
    """Return the averages of an allocator and the ranks that it keeps; empty before it has any."""
    state = {name: {**getattr(allocator, name)} for name in _AVERAGES}
    state["rank_pattern"] = {**(allocator.peft_config.rank_pattern or {})}
    return {name: values for name, values in state.items() if values}


def set_state_of_allocator(allocator: Any, state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a state that `state_of_allocator` returned, with its tensors on a device."""
    for name in _AVERAGES:
        setattr(allocator, name, {key: value.to(device) for key, value in state.get(name, {}).items()})
    allocator.ipt = {**getattr(allocator, _AVERAGES[0])}  # whose values the next update replaces
    allocator.peft_config.rank_pattern = {**state.get("rank_pattern", {})} or None

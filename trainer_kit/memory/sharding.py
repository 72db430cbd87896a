"""Memory of a step whose model is sharded over processes: what is divided, and what is gathered while it is used."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trainer_kit.config.arguments import TrainingArguments

UNITS_AT_ONCE = 3
"""Units in memory at the same time: two whose weights are gathered, and the weights or the gradient of another."""


class Sharding(NamedTuple):
    """How a model is sharded.

    Attributes:
        shards: Number of processes that share weights, gradients and optimizer state.
        gathered: Bytes of the root unit and of `UNITS_AT_ONCE` of the largest other unit.
    """

    shards: int = 1
    gathered: int = 0


def make_sharding(model: torch.nn.Module, args: TrainingArguments, shards: int, world_size: int) -> Sharding:
    """Return how a model is sharded.

    Args:
        model: Model of the run.
        args: Arguments of the run.
        shards: Number of processes that share the model; 1 for no sharding.
        world_size: Number of processes of the run; 1 for `shards`.

    Raises:
        ValueError: If the number of shards is impossible, or the model or the arguments cannot be sharded.
    """
    if shards == 1:
        return Sharding()
    if shards < 1:
        raise ValueError(f"fsdp={shards} must be at least 1")
    if world_size > 1 and world_size % shards:
        raise ValueError(f"fsdp={shards} must divide the number of processes, {world_size}")
    if args.mixed_precision in ("fp16", "fp8"):
        raise ValueError(f"mixed_precision={args.mixed_precision!r} is not possible with fsdp; use 'bf16' or 'no'")
    if args.optim not in ("adamw_torch", "sgd"):
        raise ValueError(f"optim={args.optim!r} is not possible with fsdp; use 'adamw_torch' or 'sgd'")
    from trainer_kit.strategies.fsdp.units import check_units, find_units, unit_sizes  # slow to import

    units = find_units(model)
    check_units(model, units)
    sizes = unit_sizes(model, units, torch.bfloat16 if args.mixed_precision == "bf16" else None)
    root = sizes.pop("")
    return Sharding(shards, root + UNITS_AT_ONCE * max(sizes.values(), default=0))

"""From `args.strategy` to a Strategy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from trainer_kit import environment
from trainer_kit.arguments import TrainingArguments
from trainer_kit.precision import Precision
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.single import SingleDevice


def choose_strategy(
    args: TrainingArguments, strategy: Strategy | None = None, *, downcast_bf16: bool = False, **ddp: Any
) -> Strategy:
    """The strategy for this run: the user's own one, else the one that `args.strategy` and the environment ask for.

    Args:
        args: The arguments of the run.
        strategy: The user's own one.
        downcast_bf16: An argument of `XLA`, where that is chosen.
        ddp: Arguments of `DDP`, where that is chosen.

    Raises:
        TypeError: If `strategy` is no Strategy.
        ValueError: If a launcher started several processes, but each would train alone.
    """
    if strategy is None:
        strategy = _by_name(args, downcast_bf16, ddp)
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy={strategy!r} is no Strategy; give an instance such as SingleDevice('cuda:1')")
    if strategy.precision is None:
        strategy.precision = Precision(args.mixed_precision)
    return strategy


def _by_name(args: TrainingArguments, downcast_bf16: bool, ddp: Mapping[str, Any]) -> Strategy:
    place, device = environment.place(), "cpu" if args.use_cpu else None
    name = args.strategy
    if name == "auto" and not args.use_cpu and environment.xla_device_type() is not None:
        name = "xla"
    elif name == "auto" and environment.pjrt_device() == "TPU" and not environment.has_torch_xla():
        warnings.warn("PJRT_DEVICE=TPU, but torch_xla is not installed: this run does not use the TPU", stacklevel=4)
    if name == "auto":
        name = "single" if place.world_size == 1 else "multinode" if place.has_several_machines else "ddp"
    # Imported where they are used: torch.distributed takes its time.
    if name == "ddp":
        from trainer_kit.strategies.ddp import DDP

        return DDP(device=device, **ddp)
    if name == "xla":
        from trainer_kit.strategies.xla import XLA

        return XLA(downcast_bf16=downcast_bf16)
    if name == "multinode":
        from trainer_kit.strategies.multinode import MultiNode

        return MultiNode(device=device, **ddp)
    if place.world_size > 1:
        raise ValueError(
            f"a launcher started {place.world_size} processes, but strategy={args.strategy!r} trains with one: each "
            "would train alone; leave strategy at 'auto', or start the script without the launcher"
        )
    return SingleDevice(device)

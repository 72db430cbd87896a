"""Choice of the strategy for a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from trainer_kit.config import environment
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.utils.user_warnings import warn


def choose_strategy(
    args: TrainingArguments, strategy: Strategy | None = None, *, downcast_bf16: bool = False, **options: Any
) -> Strategy:
    """Return the strategy for a run.

    Args:
        args: The arguments of the run.
        strategy: The user's own strategy; None: choose by `args.strategy` and the launcher's environment.
        downcast_bf16: Argument of `XLA`, if that is chosen.
        options: Arguments of `DDP`, `MultiNode` or `FSDP`, if one is chosen.

    Raises:
        TypeError: If `strategy` is no Strategy.
        ValueError: If a launcher started several processes, but each would train alone.
    """
    if strategy is None:
        strategy = _by_name(args, downcast_bf16, options)
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy={strategy!r} is no Strategy; give an instance such as SingleDevice('cuda:1')")
    if strategy.precision is None:
        strategy.precision = Precision(args.mixed_precision, args.float32_matmul_precision)
    strategy.channels_last = args.channels_last
    return strategy


def _by_name(args: TrainingArguments, downcast_bf16: bool, options: Mapping[str, Any]) -> Strategy:
    place = environment.place()
    name, reason = _name(args, place)
    strategy = _made(name, args, place, downcast_bf16, options)
    strategy.reason = "; ".join([reason, *_why_device(args, strategy)])
    return strategy


def _name(args: TrainingArguments, place: environment.Place) -> tuple[str, str]:
    """Return the strategy's name and the reason for it."""
    if args.strategy != "auto":
        return args.strategy, f"strategy={args.strategy!r} asks for it"
    if environment.fsdp():
        return "fsdp", f"{environment.FSDP} is set"
    if not args.use_cpu and (kind := environment.xla_device_type()) is not None:
        return "xla", f"XLA finds devices of the type {kind}"
    if environment.pjrt_device() == "TPU" and not environment.has_torch_xla():
        warn("PJRT_DEVICE=TPU, but torch_xla is not installed: this run does not use the TPU")
    if place.world_size == 1:
        return "single", "no launcher started several processes"
    started = f"a launcher started {place.world_size} processes ({environment.launcher()})"
    if place.has_several_machines:
        return "multinode", f"{started}, {place.local_world_size} of them on this machine"
    if environment.is_elastic():
        return "multinode", f"{started}, and other machines may join"
    return "ddp", started


def _why_device(args: TrainingArguments, strategy: Strategy) -> list[str]:
    if args.use_cpu:
        return ["use_cpu=True"]
    if strategy.device.type == "cpu":
        return ["torch finds no accelerator"]
    return ["torch finds this accelerator"] if strategy.device.type in ("cuda", "mps") else []


def _made(
    name: str, args: TrainingArguments, place: environment.Place, downcast_bf16: bool, options: Mapping[str, Any]
) -> Strategy:
    device = "cpu" if args.use_cpu else None
    # Imported lazily: torch.distributed is slow to import.
    if name == "ddp":
        from trainer_kit.strategies.ddp import DDP

        return DDP(device=device, **options)
    if name == "xla":
        from trainer_kit.strategies.xla.strategy import XLA

        return XLA(downcast_bf16=downcast_bf16)
    if name == "multinode":
        from trainer_kit.strategies.multinode import MultiNode

        return MultiNode(device=device, **options)
    if name == "fsdp":
        from trainer_kit.strategies.fsdp.strategy import FSDP

        known = inspect.signature(FSDP).parameters
        for option, value in options.items():
            if option not in known:
                raise ValueError(f"{option}={value!r} is an option of DDP, but strategy is 'fsdp'; remove it")
        return FSDP(device=device, **options)
    if place.world_size > 1:
        raise ValueError(
            f"a launcher started {place.world_size} processes, but strategy={args.strategy!r} trains with one: each "
            "would train alone; leave strategy at 'auto', or start the script without the launcher"
        )
    return SingleDevice(device)

"""Random number generators of all processes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import numpy as np
import torch

from trainer_kit.accelerator.state import PartialState
from trainer_kit.accelerator.utils.enums import RNGType
from trainer_kit.config import environment

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, numpy and torch, including those of all devices.

    Args:
        seed: Nonnegative whole number. It also sets the order of samples in loaders that are prepared later.
        device_specific: Whether to add the rank, so that each process draws different dropout masks.
        deterministic: Whether torch uses deterministic algorithms only, which can be slower; see
            `torch.use_deterministic_algorithms`.

    Raises:
        ValueError: If `seed` is negative.
    """
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; use 0 or more")
    if device_specific:
        seed += environment.place().rank
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if "torch_xla" in sys.modules:
        from trainer_kit.strategies.xla.strategy import seed_devices

        seed_devices(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Give all processes the main process's state of generators. Collective.

    Args:
        rng_types: "torch", "generator", or the name of a device, such as "cuda".
        generator: The generator that "generator" stands for.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give all processes the main process's state of one generator; see `synchronize_rng_states`.

    Raises:
        ValueError: If there is no such generator.
    """
    kind, state = RNGType(rng_type), PartialState()
    collectives = state.strategy.collectives
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise ValueError("synchronize_rng_state('generator') needs generator=; give the generator")
        generator.set_state(collectives.broadcast(generator.get_state()))
    elif kind == RNGType.TORCH:
        torch.set_rng_state(collectives.broadcast(torch.get_rng_state()))
    elif kind.value == state.device.type:
        state.strategy.device_info.set_rng_state(collectives.broadcast(state.strategy.device_info.rng_state()))
    else:
        raise ValueError(f"rng_type={kind.value!r} names another device than this run's, {state.device.type!r}")

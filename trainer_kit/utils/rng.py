"""The host's random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(value: int) -> None:
    """Seed the host's generators of torch, numpy and random, without the slow seeding of devices.

    Args:
        value: The seed; numpy uses its lowest 32 bits.
    """
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def generator_states() -> dict[str, Any]:
    """Return the states of the host's generators, for `set_generator_states`."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore states of the host's generators that `generator_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators of the host, and of `device` if it is a CUDA device, at the end of the context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

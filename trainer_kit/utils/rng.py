"""The host's generators of random numbers: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(value: int) -> None:
    """Seeds the host generators of torch, numpy and random: torch.manual_seed would touch every device, slowly."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def generator_states() -> dict[str, Any]:
    """The states of the host's generators, for `set_generator_states`."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Sets the host's generators to what `generator_states` gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leaves the generators of the host, and of a CUDA device, as they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

"""The host's generators of random numbers: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_generators(value: int) -> None:
    """Seeds the host generators of torch, numpy and random: torch.manual_seed would touch every device, slowly."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


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

"""The host's random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 625 * 4
"""Memory of the state of numpy's MT19937: 624 words and an index."""


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
    python, numpy, host = random.getstate(), _NumpyState(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        numpy.restore()
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


class _NumpyState:
    """State of numpy's global generator, copied as memory.

    `np.random.get_state` and `set_state` convert it number by number, which takes longer than to read a small batch.
    """

    def __init__(self) -> None:
        self._generator = _bit_generator()
        self._state: dict[str, Any] | None = None
        if type(self._generator) is not np.random.MT19937:
            self._state = np.random.get_state(legacy=False)
            return
        self._address = self._generator.ctypes.state_address
        self._memory = ctypes.string_at(self._address, _MT19937_BYTES)
        # Normal numbers are drawn in pairs. The second is kept outside of that memory, and comes without a draw.
        number = np.random.standard_normal()
        if ctypes.string_at(self._address, _MT19937_BYTES) == self._memory:
            self._state = np.random.get_state(legacy=False) | {"has_gauss": 1, "gauss": number}
        self.restore()

    def restore(self) -> None:
        if _bit_generator() is not self._generator:
            np.random.set_bit_generator(self._generator)  # type: ignore[attr-defined]
        if self._state is not None:
            np.random.set_state(self._state)
        else:
            np.random.seed(0)  # drops a number that is kept
            ctypes.memmove(self._address, self._memory, _MT19937_BYTES)


def _bit_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it

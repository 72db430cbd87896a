"""The host's random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_WORDS = 624
_MT19937_BYTES = 4 * (_WORDS + 1)
"""Memory of the state of numpy's or Python's MT19937: its words and an index, which is last for numpy."""


def seed_generators(value: int) -> None:
    """Seed the host's generators of torch, numpy and random, without the slow seeding of devices.

    `random` gets the state that numpy's MT19937 would have after a seed of its own: `random.seed` takes longer than all
    the rest together.

    Args:
        value: The seed; numpy uses its lowest 32 bits, and random 32 bits of a hash (Knuth's multiplicative one).
    """
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    _SEEDER.seed(((value + 1) * 0x9E3779B97F4A7C15 >> 32) & 0xFFFFFFFF)
    if _ADDRESS is None:
        random.setstate((3, (*_SEEDED.state["state"]["key"].tolist(), _WORDS), None))
        return
    ctypes.memmove(_ADDRESS + 4, _SEEDED_ADDRESS, 4 * _WORDS)
    ctypes.c_int.from_address(_ADDRESS).value = _WORDS  # all of them are to come
    _PYTHON.gauss_next = None


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
    states = KeptGenerators(device)
    try:
        yield
    finally:
        states.restore()


class KeptGenerators:
    """States of the generators of the host, copied as memory where possible.

    Args:
        device: A CUDA device whose generator is kept too; another device, or None, is ignored.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._python, self._numpy, self._torch = PythonState(), _NumpyState(), torch.default_generator.get_state()
        self._device = device if device is not None and device.type == "cuda" else None
        self._on_device = None if self._device is None else torch.cuda.get_rng_state(self._device)

    @property
    def has_unused_normal(self) -> bool:
        """Whether numpy keeps the second number of a pair, which can be drawn without changing the memory."""
        return self._numpy.state is not None

    def have_changed(self) -> bool:
        """Return whether Python's or numpy's generator has changed; a number that is kept apart does not show."""
        return self._python.has_changed() or self._numpy.has_changed()

    def restore(self) -> None:
        """Restore the states."""
        self._python.restore()
        if self._numpy.state is not None or self._numpy.has_changed():
            self._numpy.restore()
        torch.default_generator.set_state(self._torch)
        if self._device is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


def torch_memory() -> bytes:
    """Return the state of torch's generator, to compare."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


class PythonState:
    """State of Python's global generator; `random.getstate` converts it number by number."""

    def __init__(self) -> None:
        self._gauss = _PYTHON.gauss_next
        self._state: Any = random.getstate() if _ADDRESS is None else ctypes.string_at(_ADDRESS, _MT19937_BYTES)

    def has_changed(self) -> bool:
        now = random.getstate() if _ADDRESS is None else ctypes.string_at(_ADDRESS, _MT19937_BYTES)
        return bool(now != self._state) or _PYTHON.gauss_next != self._gauss

    def restore(self) -> None:
        if _ADDRESS is None:
            random.setstate(self._state)
        else:
            ctypes.memmove(_ADDRESS, self._state, _MT19937_BYTES)
            _PYTHON.gauss_next = self._gauss


class _NumpyState:
    """State of numpy's global generator, copied as memory.

    `np.random.get_state` and `set_state` convert it number by number, which takes longer than to read a small batch.
    """

    def __init__(self) -> None:
        self._generator = _bit_generator()
        self.state: dict[str, Any] | None = None  # if the memory is not the whole state
        if type(self._generator) is not np.random.MT19937:
            self.state = np.random.get_state(legacy=False)
            return
        self._address = self._generator.ctypes.state_address
        self._memory = ctypes.string_at(self._address, _MT19937_BYTES)
        # Normal numbers are drawn in pairs. The second is kept outside of that memory, and comes without a draw.
        number = np.random.standard_normal()
        if ctypes.string_at(self._address, _MT19937_BYTES) == self._memory:
            self.state = np.random.get_state(legacy=False) | {"has_gauss": 1, "gauss": number}
        self.restore()

    def has_changed(self) -> bool:
        same = self.state is None and _bit_generator() is self._generator
        return not same or ctypes.string_at(self._address, _MT19937_BYTES) != self._memory

    def restore(self) -> None:
        if _bit_generator() is not self._generator:
            np.random.set_bit_generator(self._generator)  # type: ignore[attr-defined]
        if self.state is not None:
            np.random.set_state(self.state)
        else:
            np.random.seed(0)  # drops a number that is kept
            ctypes.memmove(self._address, self._memory, _MT19937_BYTES)


def _bit_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it


def _python_address() -> int | None:
    """Return the address of the state of Python's generator; None where it is not in its object as in CPython."""
    if sys.implementation.name != "cpython":
        return None
    address = id(_PYTHON) + object.__basicsize__
    version, (*words, index), _ = random.getstate()
    expected = struct.pack("i624I", index, *words)
    is_inside = random.Random.__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
    is_known = version == 3 and is_inside and ctypes.string_at(address, _MT19937_BYTES) == expected
    return address if is_known else None


_PYTHON: Any = random._inst
_ADDRESS = _python_address()
_SEEDED = np.random.MT19937()
_SEEDER = np.random.RandomState(_SEEDED)
_SEEDED_ADDRESS = _SEEDED.ctypes.state_address

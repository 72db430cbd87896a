"""The host's random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_WORDS = 624
_WORDS_BYTES = 4 * _WORDS
"""Memory of the words of a Mersenne Twister (MT19937), which all three generators are."""


def seed_generators(value: int) -> None:
    """Seed the host's generators of torch, numpy and random, without the slow seeding of devices.

    `random` gets the state that numpy's MT19937 would have after a seed of its own: `random.seed` takes longer than all
    the rest together.

    Args:
        value: The seed; numpy uses its lowest 32 bits, and random 32 bits of a hash (Knuth's multiplicative one).
    """
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    _host().python.seed_as_numpy(((value + 1) * 0x9E3779B97F4A7C15 >> 32) & 0xFFFFFFFF)


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
    """States of the generators of the host, copied as memory where possible: about 1 µs, and as much to compare.

    Args:
        device: A CUDA device whose generator is kept too; another device, or None, is ignored.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._host = _host()
        self._states = self._host.states()
        self._device = device if device is not None and device.type == "cuda" else None
        self._on_device = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        """Restore the states."""
        self._host.restore(self._states)
        if self._device is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


def without_draws(read: Callable[[], T], seed: int) -> tuple[T] | None:
    """Read something with torch's generator seeded alone, which is cheap, in the hope that it draws no random numbers.

    Args:
        read: Returns what is read.
        seed: What `torch.initial_seed()` returns then.

    Returns:
        A tuple with what was read; None if it has to be read again, with all generators seeded, since one has changed.
    """
    torch.default_generator.manual_seed(seed)
    host = _host()
    states = host.states()
    try:
        result = read()
    except Exception:
        if host.have_left(states):
            return None
        raise
    return None if host.have_left(states) else (result,)


class _Memory:
    """A part of this process's memory. The caller keeps its owner alive."""

    def __init__(self, address: int, size: int) -> None:
        self.view = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        self.read = self.view.tobytes

    def write(self, content: bytes) -> None:
        self.view[:] = content


class _Python:
    """The global generator of `random`; `random.getstate` converts its words one by one."""

    def __init__(self) -> None:
        self.random: Any = random._inst
        self.memory = _python_memory()
        if self.memory is not None:
            self._index, self.words = self.memory.view[:4].cast("i"), self.memory.view[4:]
        self._seeded = np.random.MT19937()
        self._seeder = np.random.RandomState(self._seeded)
        self._seeded_words = _Memory(self._seeded.ctypes.state_address, _WORDS_BYTES).view

    def state(self) -> Any:
        if self.memory is None:
            return random.getstate()
        return self.memory.read(), self.random.gauss_next

    def restore(self, state: Any) -> None:
        if self.memory is None:
            random.setstate(state)
        else:
            self.memory.write(state[0])
            self.random.gauss_next = state[1]

    def seed_as_numpy(self, value: int) -> None:
        """Take the state that numpy's generator would have after a seed of 32 bits."""
        self._seeder.seed(value)
        if self.memory is None:
            random.setstate((3, (*self._seeded.state["state"]["key"].tolist(), _WORDS), None))
            return
        self.words[:] = self._seeded_words
        self._index[0] = _WORDS  # all of them are to come
        self.random.gauss_next = None


class _Numpy:
    """The global generator of numpy; `np.random.get_state` and `set_state` convert its words one by one.

    Normal numbers are drawn in pairs, and the second is kept outside of the words.
    """

    def __init__(self) -> None:
        self.generator = _bit_generator()
        self.words, self.normal = _numpy_memory(self.generator)

    def state(self) -> Any:
        generator = _bit_generator()
        if self.normal is None or self.words is None or generator is not self.generator:
            return generator, _comparable(np.random.get_state(legacy=False))
        return generator, self.words.read(), self.normal.read()

    def restore(self, state: Any) -> None:
        if _bit_generator() is not state[0]:
            np.random.set_bit_generator(state[0])  # type: ignore[attr-defined]
        if len(state) == 2:
            np.random.set_state(state[1])
            return
        assert self.words is not None
        assert self.normal is not None
        self.words.write(state[1])
        self.normal.write(state[2])


class _Torch:
    """The global generator of torch for the host."""

    def __init__(self) -> None:
        self.generator = torch.default_generator
        self.memory = _torch_memory(self.generator)

    def state(self) -> bytes:
        if self.memory is not None:
            return self.memory.read()
        state = self.generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def restore(self, state: bytes) -> None:
        if self.memory is not None:
            self.memory.write(state)
        else:
            self.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Host:
    """The generators of this process."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = _Python(), _Numpy(), _Torch()
        memories = self.python.memory, self.numpy.words, self.numpy.normal, self.torch.memory
        self.reads = None if None in memories else [memory.read for memory in memories if memory is not None]

    def states(self) -> tuple[Any, ...]:
        """Return the states: all as memory at once, or converted one by one."""
        if self.reads is None or np.random.get_bit_generator() is not self.numpy.generator:  # type: ignore[attr-defined]
            return self.python.state(), self.numpy.state(), self.torch.state()
        python, words, normal, of_torch = self.reads
        return self.python.random.gauss_next, python(), words(), normal(), of_torch()

    def have_left(self, states: tuple[Any, ...]) -> bool:
        """Return whether a generator has another state now."""
        now = self.states()
        if now == states:
            return False
        # After a state of torch's was set again, memory that does not matter may differ.
        return now[:-1] != states[:-1] or self.reads is None or _used_fields(now[-1]) != _used_fields(states[-1])

    def restore(self, states: tuple[Any, ...]) -> None:
        """Restore the states that `states` returned."""
        if len(states) == 5:
            gauss, words, numpy_words, normal, of_torch = states
            states = (words, gauss), (self.numpy.generator, numpy_words, normal), of_torch
        for restore, state in zip((self.python.restore, self.numpy.restore, self.torch.restore), states, strict=True):
            restore(state)


@functools.cache
def _host() -> _Host:
    """Find the generators at their first use: it takes a millisecond, and the import of numpy's."""
    return _Host()


def _comparable(state: Any) -> Any:
    """Return a state of numpy's with lists in place of its arrays."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _bit_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it


def _python_memory() -> _Memory | None:
    """Return the index and the words of Python's generator; None where they are not in its object as in CPython."""
    if sys.implementation.name != "cpython":
        return None
    size = 4 + _WORDS_BYTES
    version, (*words, index), _ = random.getstate()
    if version != 3 or random.Random.__basicsize__ < object.__basicsize__ + size:
        return None
    memory = _Memory(id(random._inst) + object.__basicsize__, size)
    return memory if memory.read() == struct.pack(f"i{_WORDS}I", index, *words) else None


def _numpy_memory(generator: Any) -> tuple[_Memory | None, _Memory | None]:
    """Return the words and index of numpy's generator, and the normal number that it keeps; None if not found."""
    if type(generator) is not np.random.MT19937 or sys.implementation.name != "cpython":
        return None, None
    owner = np.random.mtrand._rand
    fields = _Memory(id(owner) + object.__basicsize__, type(owner).__basicsize__ - object.__basicsize__)
    state, kept = np.random.get_state(legacy=False), struct.pack("iid", 1, 0, 0.123456789)
    np.random.set_state(state | {"has_gauss": 1, "gauss": 0.123456789})
    # The number follows a flag: the bytes between them may be anything.
    place = fields.read().find(kept[8:]) - 8
    found = place >= 0 and fields.read()[place : place + 4] == kept[:4]
    np.random.set_state(state)
    words = _Memory(generator.ctypes.state_address, _WORDS_BYTES + 4)
    return words, _Memory(id(owner) + object.__basicsize__ + place, 16) if found else None


def _torch_memory(generator: Any) -> _Memory | None:
    """Return the engine of torch's generator and the normal numbers that it keeps; None if they are not found."""
    state = generator.get_state()
    words = state[24 : 24 + 8 * _WORDS].view(torch.int64).to(torch.uint32).numpy().tobytes()
    seed = struct.pack("Q", generator.initial_seed())
    for place in range(generator._cdata, generator._cdata + 512, 4):
        if ctypes.string_at(place, 8) == seed and ctypes.string_at(place + _TO_WORDS, 8) == words[:8]:
            memory = _Memory(place, _TORCH_FIELDS.size)
            is_found = _TORCH_FIELDS.unpack(memory.read())[2] == words and _shows_each_use(memory, generator)
            generator.set_state(state)
            if is_found:
                return memory
    return None


def _shows_each_use(memory: _Memory, generator: torch.Generator) -> bool:
    """Return whether each draw changes the memory, and writing it back restores the generator."""
    before, state = memory.read(), generator.get_state()
    seen = [before]
    for dtype in (torch.float32, torch.float64):
        for draw in (torch.rand, torch.randn, torch.randn):  # the second normal number of a pair is kept
            draw(1, dtype=dtype, generator=generator, device="cpu")
            seen.append(memory.read())
    memory.write(before)
    return len(set(map(_used_fields, seen))) == len(seen) and torch.equal(generator.get_state(), state)


_TORCH_FIELDS = struct.Struct(f"=13s3x4s{_WORDS_BYTES}s4x4s?3x8s?7x")
"""Fields of the C++ object: seed, draws left and a flag; next word; words; two normal numbers, with flags."""

_TO_WORDS = 20


def _used_fields(memory: bytes) -> tuple[Any, ...]:
    """Return the fields in the memory of torch's generator, without normal numbers that were drawn."""
    start, following, words, single, has_single, double, has_double = _TORCH_FIELDS.unpack(memory)
    return start, following, words, has_single and single, has_double and double

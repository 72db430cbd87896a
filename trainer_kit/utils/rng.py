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
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")
_WORDS = 624
_WORDS_BYTES = 4 * _WORDS
"""Memory of the words of a Mersenne Twister (MT19937), which all three generators are."""

_TORCH_FIELDS = struct.Struct(f"=13s3x4s{_WORDS_BYTES}s4x4s?3x8s?7x")
"""Fields of torch's `CPUGeneratorImpl`: those of its engine, `at::mt19937_data_pod` (seed, draws left and a flag; next
word; words), and the two normal numbers that it keeps, each with a flag."""

_TO_WORDS = 20
"""Bytes of these fields before the words."""


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
    """States of the generators of the host, copied as memory where possible, which takes about 1 µs.

    Args:
        device: A CUDA device whose generator is kept too; another device, or None, is ignored.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._host = _host()
        self._states = self._host.states()
        self._device = device if device is not None and device.type == "cuda" else None
        self._on_device = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def swapped(self) -> KeptGenerators:
        """Restore the states; return those of before."""
        present = KeptGenerators(self._device)
        self.restore()
        return present

    def restore(self) -> None:
        """Restore the states."""
        self._host.restore(self._states)
        if self._device is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


def read_watched(read: Callable[[], T]) -> tuple[T | None, bool]:
    """Read something, and watch the generators of the host.

    Args:
        read: Returns what is read; what it raises counts only if it has drawn nothing.

    Returns:
        What was read, None for an error that does not count; and whether a generator has changed.
    """
    host = _host()
    states = host.states()
    try:
        result = read()
    except Exception:
        if host.differ_from(states):
            return None, True
        raise
    return result, host.differ_from(states)


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
            self._index, self._words = self.memory.view[:4].cast("i"), self.memory.view[4:]
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
        self._words[:] = self._seeded_words
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
        generator, words, *normal = state
        if _bit_generator() is not generator:
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        if not normal:
            np.random.set_state(words)
            return
        assert self.words is not None
        assert self.normal is not None
        with generator.lock:
            self.words.write(words)
            self.normal.write(normal[0])


class _Torch:
    """The global generator of torch for the host."""

    def __init__(self) -> None:
        self.generator = torch.default_generator
        self.memory = _torch_memory(self.generator)

    def state(self) -> bytes:
        return _state_bytes(self.generator) if self.memory is None else self.memory.read()

    def restore(self, state: bytes) -> None:
        if self.memory is not None:
            self.memory.write(state)
        else:
            self.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _HostGenerators:
    """The generators of this process.

    Attributes:
        reads: Functions that read the memory of their states, if all are known; else None.
    """

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = _Python(), _Numpy(), _Torch()
        memories = self.python.memory, self.numpy.words, self.numpy.normal, self.torch.memory
        self._memories = [memory for memory in memories[:3] if memory is not None]
        self.reads = None if None in memories else [memory.read for memory in memories if memory is not None]
        self._bit_generator = np.random.get_bit_generator  # type: ignore[attr-defined]  # without a call more

    def states(self) -> tuple[Any, ...]:
        """Return the states, torch's last: five values as memory, at once, or three that are converted one by one."""
        if self.reads is None or self._bit_generator() is not self.numpy.generator:
            return self.python.state(), self.numpy.state(), self.torch.state()
        python, words, normal, of_torch = self.reads
        return self.python.random.gauss_next, python(), words(), normal(), of_torch()

    def differ_from(self, states: tuple[Any, ...]) -> bool:
        """Return whether a generator has another state now."""
        now = self.states()
        if now == states:
            return False
        # After a state of torch's was set again, memory that does not matter may differ.
        return now[:-1] != states[:-1] or self.reads is None or _used_fields(now[-1]) != _used_fields(states[-1])

    def restore(self, states: tuple[Any, ...]) -> None:
        """Restore what `states` returned."""
        *others, of_torch = states
        if len(others) == 4:
            if self._bit_generator() is not self.numpy.generator:
                np.random.set_bit_generator(self.numpy.generator)  # type: ignore[attr-defined]
            self.python.random.gauss_next, *contents = others
            with self.numpy.generator.lock:  # numpy draws in other threads while this one runs
                for memory, content in zip(self._memories, contents, strict=True):
                    memory.view[:] = content
        else:
            self.python.restore(others[0])
            self.numpy.restore(others[1])
        self.torch.restore(of_torch)


@functools.cache
def _host() -> _HostGenerators:
    """Find the generators at their first use: it takes a millisecond, and the import of numpy's."""
    return _HostGenerators()


def _comparable(state: Any) -> Any:
    """Return a state of numpy's with lists in place of its arrays."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _bit_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs lack it


def _state_bytes(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


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
    """Return the words and the index of numpy's generator, and the normal number that it keeps with its flag.

    Each is None if it is not found. The place of the number is looked for in a generator of its own.
    """
    if type(generator) is not np.random.MT19937 or sys.implementation.name != "cpython":
        return None, None
    words = _Memory(generator.ctypes.state_address, _WORDS_BYTES + 4)
    owner, other = np.random.mtrand._rand, np.random.RandomState()
    number = struct.pack("d", 0.123456789)
    other.set_state(other.get_state(legacy=False) | {"has_gauss": 1, "gauss": 0.123456789})
    size = type(other).__basicsize__ - object.__basicsize__
    # The flag is before the number: the bytes between them may be anything.
    offset = object.__basicsize__ + _Memory(id(other) + object.__basicsize__, size).read().find(number) - 8
    if type(owner) is not type(other) or offset < object.__basicsize__:
        return words, None
    normal, state = _Memory(id(owner) + offset, 16), np.random.get_state(legacy=False)
    flag, found = struct.unpack("i4xd", normal.read())
    is_known = flag == state["has_gauss"] and (not flag or found == state["gauss"])
    return words, normal if is_known else None


def _torch_memory(generator: Any) -> _Memory | None:
    """Return the engine of torch's generator and the normal numbers that it keeps; None if they are not found.

    Their place is looked for in a generator of its own, in which each use has to show.
    """
    with _disable_current_modes():  # such as that of fake tensors, which draw nothing
        other: Any = torch.Generator().manual_seed(0x5EED_0F_70_4C_11)
        offset = _torch_offset(other)
        if offset is None or not _shows_each_use(_Memory(other._cdata + offset, _TORCH_FIELDS.size), other):
            return None
    memory = _Memory(generator._cdata + offset, _TORCH_FIELDS.size)
    is_same = type(generator) is type(other) and _TORCH_FIELDS.unpack(memory.read())[2] == _torch_words(generator)
    return memory if is_same else None


def _torch_offset(generator: Any) -> int | None:
    seed, words = struct.pack("Q", generator.initial_seed()), _torch_words(generator)
    for offset in range(0, 512, 4):
        place = generator._cdata + offset
        if ctypes.string_at(place, 8) == seed and ctypes.string_at(place + _TO_WORDS, _WORDS_BYTES) == words:
            return offset
    return None


def _torch_words(generator: torch.Generator) -> bytes:
    """Return the words from a state, which has them in 64 bits each, after 24 bytes."""
    return np.frombuffer(_state_bytes(generator), np.uint64, _WORDS, 24).astype(np.uint32).tobytes()


def _shows_each_use(memory: _Memory, generator: torch.Generator) -> bool:
    """Return whether each draw changes the memory, and writing it back restores the generator."""
    before, state = memory.read(), _state_bytes(generator)
    seen = [before]
    for dtype in (torch.float32, torch.float64):
        for draw in (torch.rand, torch.randn, torch.randn):  # the second normal number of a pair is kept
            draw(1, dtype=dtype, generator=generator, device="cpu")
            seen.append(memory.read())
    memory.write(before)
    return len(set(map(_used_fields, seen))) == len(seen) and _state_bytes(generator) == state


def _used_fields(memory: bytes) -> tuple[Any, ...]:
    """Return the fields in the memory of torch's generator, without normal numbers that were drawn."""
    start, following, words, single, has_single, double, has_double = _TORCH_FIELDS.unpack(memory)
    return start, following, words, has_single and single, has_double and double

"""Blocks of memory: where a storage is, who uses it, and how much a device has left."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from kit.fake_cuda.clocks import Clock, Moment, Stream

_UNIT = 512  # bytes, the smallest block of torch's allocator


class Block:
    """The memory of one storage.

    Args:
        device: The device that holds it; None: page-locked memory of the host.
        size: Bytes.
        stream: The stream on which it was allocated, and may be reused; None for the host's.

    Attributes:
        write: The last write by a stream.
        reads: The last read since then, of each stream.
        users: The last access of each stream.
        recorded: Streams that `record_stream` named: the allocator waits for them before it reuses the block.
    """

    def __init__(self, device: torch.device | None, size: int, stream: Stream | None = None) -> None:
        self.device, self.size, self.stream = device, -(-size // _UNIT) * _UNIT, stream
        self.write: Moment | None = None
        self.reads = Clock()
        self.users = Clock()
        self.recorded: set[int] = set()

    def unordered(self, clock: Clock, writes: bool) -> Moment | None:
        """Return an earlier access that may still run when an operation with this clock begins."""
        earlier = [self.write] if self.write is not None else []
        if writes:
            earlier += [Moment(*read) for read in self.reads.items()]
        return next((each for each in earlier if not clock.comes_after(each)), None)

    def record(self, moment: Moment, writes: bool) -> None:
        """Record an access of a stream."""
        self.users[moment.stream] = moment.number
        if writes:
            self.write, self.reads = moment, Clock()
        else:
            self.reads[moment.stream] = moment.number

    def used_at_end(self, host: Clock) -> Moment | None:
        """Return an access that may still run when a thread with the clock `host` frees the block."""
        assert self.stream is not None
        known = Clock(self.stream.clock)
        known.join(host)
        others = (Moment(*use) for use in self.users.items() if use[0] not in {self.stream.id, *self.recorded})
        return next((each for each in others if not known.comes_after(each)), None)


class Pool:
    """The memory of a device in bytes; None as the limit: as much as is wanted."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = self.peak = 0

    def allocate(self, size: int) -> None:
        if self.limit is not None and self.used + size > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes, with {self.limit - self.used} free"
            )
        self.used += size
        self.peak = max(self.peak, self.used)

    def free(self, size: int) -> None:
        self.used -= size


class PinnedPool:
    """Page-locked memory of the host: blocks of powers of two, which are kept when they are freed, as torch does.

    Attributes:
        held: Bytes that are allocated from the system.
        blocks: Number of allocations from the system.
    """

    def __init__(self) -> None:
        self.held = self.blocks = 0
        self._free: Counter[int] = Counter()

    def allocate(self, size: int) -> None:
        size = _rounded(size)
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.held += size
            self.blocks += 1

    def free(self, size: int) -> None:
        self._free[_rounded(size)] += 1

    def release(self) -> None:
        """Return freed blocks to the system."""
        self.held -= sum(size * count for size, count in self._free.items())
        self._free.clear()


def _rounded(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def block_of(tensor: Any) -> Block | None:
    """Return the block of a tensor's storage; None for ordinary host memory."""
    with torch._C.DisableTorchFunction():
        try:
            return getattr(tensor.untyped_storage(), "fake_block", None)
        except (NotImplementedError, RuntimeError):  # sparse, or without memory
            return None


def place_of(tensor: Any) -> torch.device | None:
    """Return the simulated device that a tensor is on; None for the host."""
    block = block_of(tensor)
    return None if block is None else block.device

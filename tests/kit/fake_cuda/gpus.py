"""`Gpus`: the state of the simulated devices, and what was found wrong."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kit.fake_cuda.clocks import Clock, Event, Stream, ThreadClock
from kit.fake_cuda.memory import Block, PinnedPool, Pool, block_of

HOST = torch.device("cpu")
_NOT_SHOWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), threading.__file__, contextlib.__file__)


class Race(NamedTuple):
    """An access that is not ordered after an earlier one."""

    what: str
    where: str


class Wait(NamedTuple):
    """A wait of the host for a device."""

    what: str
    thread: str
    where: str


class _Scope(threading.local):
    """How operations of this thread are understood at the moment.

    Attributes:
        is_off: Whether they are the simulation's own.
        asked: The device that a factory's caller asked for; None: it named none.
        ambient: The device of the call that they are a part of, for those without tensors.
        streams: The current stream of each device.
        index: The current device.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.asked: torch.device | None = None
        self.ambient: torch.device | None = None
        self.streams: dict[int, Stream] = {}
        self.index = 0


class Gpus:
    """The simulated devices.

    Args:
        count: Number of devices.
        memory: Bytes of each; None: as many as are wanted.

    Attributes:
        pinned: Page-locked memory of the host.
        races: Accesses that streams, events and waits leave unordered.
        waits: Waits of the host for a device.
        unpinned: Places of asynchronous copies from memory that is not page-locked, which are slower.
        sync_debug_mode: See `torch.cuda.set_sync_debug_mode`.
    """

    def __init__(self, count: int = 1, memory: int | None = None) -> None:
        self.count = count
        self.races: list[Race] = []
        self.waits: list[Wait] = []
        self.unpinned: list[str] = []
        self.sync_debug_mode = "default"
        self.has_ended = False
        self.scope = _Scope()
        self.pools = [Pool(memory) for _ in range(count)]
        self.pinned = PinnedPool()
        self.generators = tuple(torch.Generator() for _ in range(count))
        self.stream_type = type("Stream", (Stream,), {"gpus": self})
        self.event_type = type("Event", (Event,), {"gpus": self})
        self._thread = ThreadClock()
        self._lock = threading.RLock()
        self._default_streams = [self.stream_type(index) for index in range(count)]

    # Devices and streams

    def device(self, device: Any = None) -> torch.device:
        """Return a CUDA device with its number; None: the current one."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        place = torch.device("cuda") if device is None else torch.device(device)
        return torch.device("cuda", self.scope.index) if place.index is None else place

    def current_stream(self, device: Any = None) -> Stream:
        index = self.device(device).index
        return self.scope.streams.get(index, self._default_streams[index])

    def default_stream(self, device: Any = None) -> Stream:
        return self._default_streams[self.device(device).index]

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream and its device the current ones."""
        if stream is None:
            yield
            return
        index, streams, scope = stream.device.index, self.scope.streams, self.scope
        before = streams.get(index, self._default_streams[index]), scope.index
        streams[index], scope.index = stream, index
        try:
            yield
        finally:
            streams[index], scope.index = before

    @property
    def host(self) -> Clock:
        """What this thread has waited for."""
        return self._thread.clock

    # How operations are understood

    @contextlib.contextmanager
    def within(
        self, ambient: torch.device | None, asked: torch.device | None = None, is_off: bool = False
    ) -> Iterator[None]:
        """Set the device of a call and what its caller asked for, or leave the simulation."""
        scope = self.scope
        before = scope.ambient, scope.asked, scope.is_off
        scope.ambient, scope.asked, scope.is_off = ambient, asked, is_off
        try:
            yield
        finally:
            scope.ambient, scope.asked, scope.is_off = before

    @property
    def is_off(self) -> bool:
        return self.scope.is_off or self.has_ended

    # Memory

    def allocate(self, tensor: torch.Tensor, device: torch.device | None) -> Block:
        """Give a tensor's storage a place: a device, or page-locked memory of the host (None)."""
        with torch._C.DisableTorchFunction():
            storage: Any = tensor.untyped_storage()
        block = Block(device, storage.nbytes(), None if device is None else self.current_stream(device))
        if device is not None:
            self.pools[device.index].allocate(block.size)
        else:
            self.pinned.allocate(storage.nbytes())
        weakref.finalize(storage, self._free, block, storage.nbytes()).atexit = False
        storage.fake_block = block
        return block

    def _free(self, block: Block, nbytes: int) -> None:
        if self.has_ended:
            return
        with self._lock:
            if block.device is None:
                self.pinned.free(nbytes)
                return
            self.pools[block.device.index].free(block.size)
            if (use := block.used_at_end(self.host)) is not None:
                self._found(f"memory freed while stream {use.stream} may use it; see record_stream")

    # Operations

    def launch(self, device: torch.device, accesses: Iterable[tuple[Block | None, bool]]) -> None:
        """Put an operation on the device's current stream.

        Args:
            device: The device.
            accesses: Each block that the operation uses, and whether it writes to it.
        """
        with self._lock:
            stream = self.current_stream(device)
            moment = stream.enqueue(self.host)
            for block, writes in accesses:
                if block is not None:
                    self._check(block, writes, stream.clock)
                    block.record(moment, writes)

    def access_on_host(self, block: Block, writes: bool) -> None:
        """Check that no stream still uses host memory that this thread reads or writes."""
        with self._lock:
            self._check(block, writes, self.host)

    def wait(self, what: str, clock: Clock) -> None:
        """Make this thread wait for all that a clock knows."""
        with self._lock:
            self.host.join(clock)
            self.waits.append(Wait(what, threading.current_thread().name, _where()))
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        if self.sync_debug_mode == "warn":
            warnings.warn(f"called a synchronizing CUDA operation ({what})", stacklevel=2)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Account for a copy between two tensors, on whatever devices."""
        if source.numel() == 0:
            return
        to, of = block_of(target), block_of(source)
        ends = [block.device for block in (of, to) if block is not None and block.device is not None]
        if not ends:
            for block, writes in ((of, False), (to, True)):
                if block is not None:
                    self.access_on_host(block, writes)
            return
        for device in ends[1:]:  # the streams of both devices wait for each other
            self.current_stream(ends[0]).wait_stream(self.current_stream(device))
        self.launch(ends[0], [(of, False), (to, True)])
        for device in ends[1:]:
            self.current_stream(device).wait_stream(self.current_stream(ends[0]))
        if len(ends) == 2:
            return
        # Copies to or from memory that is not page-locked go through the driver's own buffer, and leave no trace there.
        if not non_blocking or to is None:
            self.wait(f"copy {'to' if to is None or to.device is None else 'from'} the host", self._now(ends[0]))
        elif of is None:
            self.unpinned.append(_where())

    def wait_for_stream(self, what: str, device: torch.device) -> None:
        """Make this thread wait for the device's current stream."""
        self.wait(what, self._now(device))

    def _now(self, device: torch.device) -> Clock:
        return self.current_stream(device).clock

    def moved(self, tensor: torch.Tensor, device: torch.device | None, non_blocking: bool = False) -> torch.Tensor:
        """Return a copy on a device; None: on the host."""
        with self.within(None, is_off=True):
            copy = tensor.clone()
        if device is not None or non_blocking:  # an asynchronous copy to the host allocates page-locked memory
            self.allocate(copy, device)
        self.copy(copy, tensor, non_blocking)
        return copy

    def _check(self, block: Block, writes: bool, clock: Clock) -> None:
        if (earlier := block.unordered(clock, writes)) is not None:
            before = "write" if earlier == block.write else "read"
            self._found(
                f"{'write' if writes else 'read'} after a {before} on stream {earlier.stream} that may still run"
            )

    def _found(self, what: str) -> None:
        self.races.append(Race(what, _where()))


def _where(depth: int = 4) -> str:
    """Return the innermost calls outside of torch and the simulation."""
    frame, calls = sys._getframe(1), list[str]()
    while frame is not None and len(calls) < depth:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_SHOWN):
            calls.append(f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(calls)

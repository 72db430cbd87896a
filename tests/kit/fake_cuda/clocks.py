"""Vector clocks: which operations of which streams have certainly ended before another one begins.

An operation is numbered on its stream. A clock holds, by stream, the number of the last operation that is known to have
ended. A stream's clock is what its next operation comes after; a thread's clock is what that thread has waited for.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from kit.fake_cuda.gpus import Gpus


class Moment(NamedTuple):
    """The place of an operation on its stream."""

    stream: int
    number: int


class Clock(dict[int, int]):
    """Number of the last operation that is known to have ended, by stream."""

    def join(self, other: Clock) -> None:
        """Add what another clock knows."""
        for stream, number in other.copy().items():
            if self.get(stream, 0) < number:
                self[stream] = number

    def comes_after(self, moment: Moment) -> bool:
        return self.get(moment.stream, 0) >= moment.number


class ThreadClock(threading.local):
    """The clock of each thread."""

    def __init__(self) -> None:
        self.clock = Clock()


class Stream:
    """A queue of operations; `torch.cuda.Stream` in the simulation."""

    gpus: Gpus  # of the subclass that a simulation makes
    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.id = next(self._ids)
        self.device = self.gpus.device(device)
        self.device_index, self.device_type = self.device.index, 1
        self.clock = Clock()

    def enqueue(self, host: Clock) -> Moment:
        """Number an operation that a thread with the clock `host` launches."""
        self.clock.join(host)
        number = self.clock.get(self.id, 0) + 1
        self.clock[self.id] = number
        return Moment(self.id, number)

    def wait_stream(self, stream: Stream) -> None:
        self.clock.join(stream.clock)

    def wait_event(self, event: Event) -> None:
        self.clock.join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = torch.cuda.Event() if event is None else event  # type: ignore[assignment]
        assert event is not None
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpus.wait("Stream.synchronize", self.clock)

    def query(self) -> bool:
        self.gpus.host.join(self.clock)
        return True

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


class Event:
    """A place in a stream; `torch.cuda.Event` in the simulation."""

    gpus: Gpus  # of the subclass that a simulation makes

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.clock = Clock()
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = self.gpus.current_stream() if stream is None else stream
        self.clock = Clock(stream.clock)
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (self.gpus.current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpus.wait("Event.synchronize", self.clock)

    def query(self) -> bool:
        self.gpus.host.join(self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds up to another event."""
        if not (self.enable_timing and end.enable_timing and self._time is not None and end._time is not None):
            raise ValueError("both events must be recorded, and created with enable_timing=True")
        return (end._time - self._time) * 1000

"""Memory and time of a GPU, as the driver tells them; the GPU is played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer_kit.strategies.cuda_info import CudaClock, CudaInfo

GIB = 2**30
CUDA = torch.device("cuda", 0)


class Event:
    """Recorded at the played time; it has passed once the device has got there."""

    now = reached = 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1

    def record(self, stream: object) -> None:
        self.at = self.now

    def query(self) -> bool:
        return self.at <= self.reached

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Event]]:
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    yield Event
    Event.now = Event.reached = 0.0
    Event.made = 0


def test_memory_is_that_of_tensors_of_the_allocator_and_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"memory_allocated": 1, "memory_reserved": 3, "max_memory_allocated": 2}
    for name, gib in figures.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, gib=gib: gib * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (4 * GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: "the card")
    monkeypatch.setattr("trainer_kit.strategies.cuda_info.card_memory", lambda card: {"device_memory_gib": 9.0})
    info = CudaInfo(CUDA)
    assert info.memory() == {
        "memory_gib": 1.0, "reserved_memory_gib": 3.0, "peak_memory_gib": 2.0, "device_memory_gib": 9.0,
    }  # fmt: skip
    assert info.free_memory() == 6 * GIB  # what the allocator holds and does not use is free too


def test_only_the_events_that_have_passed_are_measured(events: type[Event]) -> None:
    clock = CudaClock(CUDA)
    marks = []
    for events.now in (0.0, 0.5, 2.0, 2.25):
        marks.append(clock.mark())
    events.reached = 1.0
    assert clock.passed(marks) == [0.5]
    events.reached = 3.0
    assert clock.passed(marks[1:]) == [1.5, 0.25]


def test_events_are_used_again(events: type[Event]) -> None:
    clock = CudaClock(CUDA)
    marks = [clock.mark() for _ in range(4)]
    clock.passed(marks)  # the last one is still needed
    assert events.made == 4
    again = [clock.mark() for _ in range(3)]
    assert events.made == 4
    assert not set(again) & {marks[-1]}
    clock.mark()
    assert events.made == 5

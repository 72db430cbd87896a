"""Operations are ordered by streams, events and waits, and what is not ordered is found."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit.fake_cuda import Gpus, fake_cuda


def race_of(function: Callable[[], object]) -> str:
    """Return the first race that a function has; empty if it has none."""
    with fake_cuda() as gpus:
        function()
        return gpus.races[0].what if gpus.races else ""


def test_streams_that_do_not_wait_race() -> None:
    def write_then(order: Callable[[torch.cuda.Stream], object], operation: Callable[[torch.Tensor], object]) -> str:
        def run() -> None:
            side = torch.cuda.Stream()
            tensor = torch.ones(4, device="cuda")
            order(side)
            with torch.cuda.stream(side):
                operation(tensor)
            torch.cuda.synchronize()
            side.synchronize()

        return race_of(run)

    def event(stream: torch.cuda.Stream) -> None:
        stream.wait_event(torch.cuda.current_stream().record_event())

    def late(stream: torch.cuda.Stream) -> None:
        stream.wait_event(torch.cuda.Event())

    for ordered in (
        event,
        lambda side: side.wait_stream(torch.cuda.current_stream()),
        lambda _: torch.cuda.synchronize(),
    ):
        assert write_then(ordered, torch.Tensor.sum) == ""
    for unordered in (late, lambda _: None):
        assert "read after a write" in write_then(unordered, torch.Tensor.sum)
        assert "write after a write" in write_then(unordered, torch.Tensor.zero_)


def test_a_write_waits_for_reads() -> None:
    def run(is_ordered: bool) -> None:
        side, tensor = torch.cuda.Stream(), torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        if is_ordered:
            torch.cuda.current_stream().wait_stream(side)
        tensor.add_(1)

    assert race_of(lambda: run(True)) == ""
    assert "write after a read" in race_of(lambda: run(False))


def test_a_copy_on_the_host_is_read_when_it_is_there() -> None:
    def run(read: Callable[[torch.Tensor], object], is_ordered: bool) -> None:
        host = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
        if is_ordered:
            torch.cuda.current_stream().synchronize()
        read(host)

    for read in (torch.Tensor.sum, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.clone):
        assert race_of(lambda read=read: run(read, True)) == ""  # type: ignore[misc]
        assert "read after a write" in race_of(lambda read=read: run(read, False))  # type: ignore[misc]


def test_a_host_buffer_is_reused_when_it_has_been_copied() -> None:
    def run(is_ordered: bool) -> None:
        buffer = torch.ones(4).pin_memory()
        copy = buffer.to("cuda", non_blocking=True)
        if is_ordered:
            torch.cuda.synchronize()
        buffer.zero_()
        copy.sum()

    assert race_of(lambda: run(True)) == ""
    assert "write after a read" in race_of(lambda: run(False))


def test_memory_is_freed_when_no_other_stream_uses_it() -> None:
    def run(protect: Callable[[torch.Tensor, torch.cuda.Stream], object]) -> None:
        side, tensor = torch.cuda.Stream(), torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        protect(tensor, side)
        del tensor

    assert race_of(lambda: run(torch.Tensor.record_stream)) == ""
    assert race_of(lambda: run(lambda _, side: torch.cuda.current_stream().wait_stream(side))) == ""
    assert race_of(lambda: run(lambda _, side: side.synchronize())) == ""
    assert "freed" in race_of(lambda: run(lambda _, side: None))


def test_backward_passes_and_optimizers_are_seen() -> None:
    def run(is_ordered: bool) -> None:
        side, weight = torch.cuda.Stream(), torch.nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.AdamW([weight], fused=True)
        (weight * 2).sum().backward()
        optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = optimizer.state[weight]["exp_avg"] + 0
        if is_ordered:
            torch.cuda.current_stream().wait_stream(side)
        (weight * 2).sum().backward()
        optimizer.step()
        side.synchronize()
        del copy

    assert race_of(lambda: run(True)) == ""
    assert "write after a read" in race_of(lambda: run(False))


def by_event(work: Callable[[], None], read: Callable[[], object]) -> None:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    done.wait()
    read()
    thread.join()


def by_join(work: Callable[[], None], read: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    read()


def by_future(work: Callable[[], None], read: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
        read()


def by_submit(work: Callable[[], None], read: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread exists
        work()
        pool.submit(read).result()


def by_queue(work: Callable[[], None], read: Callable[[], object]) -> None:
    jobs: queue.Queue[None] = queue.Queue()
    thread = threading.Thread(target=lambda: (work(), jobs.put(None)))
    thread.start()
    jobs.get()
    read()
    thread.join()


@pytest.mark.parametrize("hand_over", [by_event, by_join, by_future, by_submit, by_queue])
def test_threads_know_what_others_have_waited_for(hand_over: Callable[..., None]) -> None:
    def run(is_ordered: bool) -> None:
        copies: list[torch.Tensor] = []
        tensor = torch.ones(4, device="cuda")
        torch.cuda.synchronize()

        def work() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                copies.append(tensor.to("cpu", non_blocking=True))
                if is_ordered:
                    torch.cuda.current_stream().synchronize()

        hand_over(work, lambda: copies[0].tolist())
        torch.cuda.synchronize()

    assert race_of(lambda: run(True)) == ""
    assert "read after a write" in race_of(lambda: run(False))


def test_events_measure_time(gpus: Gpus) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.record()
    assert end.query()
    assert 0 <= begin.elapsed_time(end) < 1000
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(torch.cuda.Event())

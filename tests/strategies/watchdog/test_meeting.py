"""Processes that wait for one another before a collective, and leave it if the others are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from torch.distributed import HashStore

from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.watchdog.meeting import Meeting
from trainer_kit.strategies.watchdog.peers import Problem


class Peers:
    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.ended: list[Problem] = []

    def problems(self) -> list[Problem]:
        return self.ended

    def all_wait(self, ranks: Sequence[int], seconds: float) -> bool:
        return {*ranks} <= self.waiting

    def account(self, rank: int) -> str:
        return f"rank {rank} is elsewhere"


class Monitor:
    """What a meeting needs of the heartbeat."""

    world_size, patience, round = 3, 0.05, 0

    def __init__(self, rank: int) -> None:
        self.rank, self.urgent, self.peers = rank, False, Peers()

    def explain(self, error: BaseException) -> str:
        return f"{error}; urgent={self.urgent}"


def meetings() -> tuple[list[Any], list[Meeting]]:
    monitors: list[Any] = [Monitor(rank) for rank in range(3)]
    store = HashStore()
    return monitors, [Meeting(store, each) for each in monitors]


def join(meeting: Meeting) -> None:
    meeting.join("is here", "call it on all")


def test_all_go_on_once_all_are_there() -> None:
    monitors, all_three = meetings()
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(join, each) for each in all_three[:2]]
        assert not any(each.done() for each in first)
        join(all_three[2])
        for each in first:
            each.result(10)
        for monitor in monitors:  # the numbers of another training begin again
            monitor.round = 1
        assert [each.result(10) for each in [threads.submit(join, each) for each in all_three]] == [None] * 3


def test_a_process_leaves_if_all_that_are_absent_wait_elsewhere() -> None:
    monitors, all_three = meetings()
    for monitor in monitors[:2]:
        monitor.peers.waiting = {2}
    with ThreadPoolExecutor(2) as threads:
        for rank, future in enumerate([threads.submit(join, each) for each in all_three[:2]]):
            with pytest.raises(ValueError, match=f"^rank {rank} is here, but rank 2 is elsewhere; call it on all$"):
                future.result(10)
    assert not monitors[0].urgent


def test_a_process_stays_while_one_may_still_come() -> None:
    monitors, all_three = meetings()
    monitors[0].peers.waiting = {1}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(join, all_three[0])
        assert not wait([first], 0.3).done
        monitors[0].peers.ended = [Problem(2, "failed", "rank 2 failed: KeyError")]
        with pytest.raises(LostProcessError, match="rank 2 failed: KeyError; urgent=True"):
            first.result(10)


def test_a_process_that_none_joins_leaves_as_if_it_had_not_come() -> None:
    monitors, all_three = meetings()
    monitors[0].peers.ended = [Problem(2, "left", "rank 2 has left the run")]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(all_three[0].find_absent)
        assert not wait([first], 0.3).done  # rank 1 may still come
        monitors[0].peers.waiting = {1}
        assert first.result(10) == ["rank 1 is elsewhere", "rank 2 has left the run"]
        monitors[0].peers.ended = []
        both = [threads.submit(join, each) for each in all_three[:2]]
        join(all_three[2])
        assert [each.result(10) for each in both] == [None] * 2

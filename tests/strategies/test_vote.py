"""Sums of integers over processes: in a ring and over a tree, read later than they are begun."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from kit.ranks import on_ranks

from trainer_kit.strategies import vote
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.vote import RingVote, Vote, make_tree_vote, parents

SECONDS = 60.0
watched = contextlib.nullcontext


def layouts() -> list[list[int]]:
    """Machines of ranks: one, several of 8, one process each, and ranks dealt to three machines in turn."""
    sizes = (1, 2, 8, 9, 10, 33, 64)
    whole = [[0] * size for size in sizes]
    return [*whole, *([rank // 8 for rank in range(size)] for size in (9, 33, 64)),
            *([*range(size)] for size in (10, 64)), [rank % 3 for rank in range(20)]]  # fmt: skip


@pytest.mark.parametrize("machines", layouts(), ids=str)
def test_a_tree_has_one_root_and_leaves_machines_by_their_first_process(machines: list[int]) -> None:
    found = parents(machines)
    assert [rank for rank, parent in enumerate(found) if parent is None] == [0]
    children = [[rank for rank, parent in enumerate(found) if parent == each] for each in range(len(found))]
    for rank, below in enumerate(children):
        own = [child for child in below if machines[child] == machines[rank]]
        assert len(own) <= 8
        assert len(below) - len(own) <= 8
        for child in {*below} - {*own}:
            assert machines.index(machines[child]) == child
    reached = [0]
    for rank in reached:
        reached += children[rank]
    assert sorted(reached) == [*range(len(machines))]


def test_a_tree_of_4096_processes_has_four_levels_below_its_root() -> None:
    found = parents([rank // 8 for rank in range(4096)])
    depths: dict[int | None, int] = {None: -1}
    for rank in sorted(range(4096), key=lambda rank: (rank % 8 > 0, rank)):
        depths[rank] = depths[found[rank]] + 1
    assert max(depths.values()) == 4


def numbers_of(rank: int, turn: int) -> list[int]:
    return [rank, turn, 2**40 + rank * turn, int(rank == 5)]


def in_threads(machines: list[int], make: Callable[[int, Callable[[str, Sequence[int]], Any]], Vote]) -> list[Any]:
    """Returns what each rank, a thread of this process, read in four votes."""
    store = dist.HashStore()

    def take_part(rank: int) -> list[list[int]]:
        ballots = make(rank, lambda name, ranks: vote.join_group(store, name, rank, ranks, SECONDS))
        read = []
        for turn in range(4):
            ballots.begin(numbers_of(rank, turn))
            read.append([*ballots.wait_for_sums()])
        ballots.close()
        return read

    with ThreadPoolExecutor(len(machines)) as pool:
        return [each.result(SECONDS) for each in [pool.submit(take_part, rank) for rank in range(len(machines))]]


@pytest.mark.parametrize("machines", layouts(), ids=lambda machines: f"{len(machines)} on {len({*machines})}")
def test_a_tree_sums_what_a_ring_sums(machines: list[int]) -> None:
    size = len(machines)
    expected = [[sum(column) for column in zip(*(numbers_of(rank, turn) for rank in range(size)), strict=True)]
                for turn in range(4)]  # fmt: skip
    assert in_threads(machines, lambda rank, join: make_tree_vote(rank, machines, join, watched)) == [expected] * size
    if size <= 10:  # a ring has a connection of each with each
        ring = in_threads(machines, lambda rank, join: RingVote(join("all", range(size)), watched))
        assert ring == [expected] * size


@pytest.mark.parametrize("kind", ["ring", "tree"])
def test_a_vote_that_others_do_not_join_does_not_hold_the_process(kind: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(vote.join_group, store, kind, 1, [0, 1], 5.0)
        join = functools.partial(vote.join_group, store, kind, 0, [0, 1], 5.0)
        ballots = RingVote(join(), watched) if kind == "ring" else make_tree_vote(0, [0, 0], lambda *_: join(), watched)
        other.result(SECONDS)
        begin = time.monotonic()
        ballots.begin([1])
        ballots.close()
        del ballots
        assert time.monotonic() - begin < 2.5  # freeing the group would wait for its timeout


def vote_twice(threshold: int) -> tuple[str, list[Any]]:
    """Read later than begun, with other collectives in between; the processes begin at different times."""
    strategy = DDP(device="cpu")
    strategy.setup()
    collectives = strategy.collectives
    with mock.patch.object(vote, "TREE_PROCESSES", threshold):
        ballots = collectives.make_vote(runs_ahead=True)
    read: list[Any] = []
    for turn in range(3):
        time.sleep(0.05 * (collectives.rank == turn))
        ballots.begin(numbers_of(collectives.rank, turn))
        read.append([*collectives.all_reduce_ints([1])])
        read.append([*ballots.wait_for_sums()])
    ballots.close()
    strategy.teardown()
    return type(ballots).__name__, read


@pytest.mark.distributed
@pytest.mark.parametrize(("threshold", "kind"), [(2, "TreeVote"), (99, "RingVote")])
def test_other_collectives_may_come_between_the_beginning_of_a_vote_and_its_end(threshold: int, kind: str) -> None:
    sums = [[sum(column) for column in zip(*(numbers_of(rank, turn) for rank in range(3)), strict=True)]
            for turn in range(3)]  # fmt: skip
    for result in on_ranks(3, vote_twice, threshold):
        assert result == (kind, [each for total in sums for each in ([3], total)])


def make_votes() -> list[str]:
    strategy = DDP(device="cpu")
    strategy.setup()
    made = [strategy.collectives.make_vote(ahead) for ahead in (False, True)]
    strategy.collectives.barrier()  # a group that is closed while others still connect to it ends their attempt
    for each in made:
        each.close()
    return [type(each).__name__ for each in made]


@pytest.mark.distributed
def test_no_group_is_joined_where_votes_do_not_run_ahead() -> None:
    assert on_ranks(1, make_votes) == [["Vote", "Vote"]]
    assert on_ranks(2, make_votes) == [["Vote", "RingVote"]] * 2

"""`Vote`: sums of a few integers over all processes, which may be computed while the caller continues."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # its stub names fewer

TREE_PROCESSES = 32
"""Number of processes from which sums go over a tree: gloo's ring takes as many rounds as there are processes."""

_CHILDREN = 8
_numbers = itertools.count()

Watched = Callable[[], AbstractContextManager[None]]
"""Encloses calls that wait for other processes."""


class Vote:
    """Sums of integers over all processes, one vote at a time. This class exchanges them when the sums are read.

    Args:
        all_reduce_ints: Returns integers summed over all processes.

    Attributes:
        runs_ahead: Whether the exchange begins with `begin` and continues while the caller computes.
    """

    runs_ahead = False

    def __init__(self, all_reduce_ints: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._all_reduce_ints = all_reduce_ints
        self._given: Sequence[int] = ()

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin a vote with this process's integers, below 2**63. Collective."""
        self._given = numbers

    def wait_for_sums(self) -> Sequence[int]:
        """Return each integer summed over all processes. Collective."""
        return self._all_reduce_ints(self._given)

    def close(self) -> None:
        """Release the connections. A vote that was begun and not read is given up, without waiting for it."""


class RingVote(Vote):
    """Votes by gloo's all-gather in a group of its own, so that no other collective waits for one.

    Args:
        group: A gloo group of all processes, which this object owns.
        watched: Encloses calls that wait for other processes.
    """

    runs_ahead = True

    def __init__(self, group: Any, watched: Watched) -> None:
        self._group = group
        self._watched = watched
        self._work: Any = None
        # Kept, so that no thread of the group frees the last ones, for which it needs Python.
        self._recent: deque[list[torch.Tensor]] = deque(maxlen=8)

    def begin(self, numbers: Sequence[int]) -> None:
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        parts = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._recent.append([mine, *parts])
        self._work = self._group.allgather([parts], [mine])

    def wait_for_sums(self) -> Sequence[int]:
        with self._watched():
            self._work.wait()
        self._work = None
        return [sum(column) for column in zip(*(part.tolist() for part in self._recent[-1][1:]), strict=True)]

    def close(self) -> None:
        if self._work is not None and not self._work.is_completed():
            _leak(self._group, self._recent)
        self._group = self._work = None  # before the tensors: ends the group's threads


class TreeVote(Vote):
    """Votes by sums up and down a tree, in a thread.

    Args:
        to_parent: A gloo group whose rank 0 is the parent of this process, which this object owns; None for the root.
        to_children: A gloo group whose rank 0 is this process and whose others are its children, which this object
            owns; None for a leaf.
        watched: Encloses calls that wait for other processes.
    """

    runs_ahead = True

    def __init__(self, to_parent: Any, to_children: Any, watched: Watched) -> None:
        self._to_parent = to_parent
        self._to_children = to_children
        self._watched = watched
        self._is_open = False
        self._asked: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()
        self._sums: queue.SimpleQueue[Sequence[int] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_answer,
            args=(to_parent, to_children, self._asked, self._sums),
            name="trainer_kit votes",
            daemon=True,
        )
        self._thread.start()

    def begin(self, numbers: Sequence[int]) -> None:
        self._is_open = True
        self._asked.put(numbers)

    def wait_for_sums(self) -> Sequence[int]:
        with self._watched():
            sums = self._sums.get()
            if isinstance(sums, BaseException):
                raise sums
        self._is_open = False
        return sums

    def close(self) -> None:
        self._asked.put(None)
        if not self._is_open:  # else the thread may wait for others, with the groups that it holds
            self._thread.join()
        self._to_parent = self._to_children = None


def _answer(
    to_parent: Any,
    to_children: Any,
    asked: queue.SimpleQueue[Sequence[int] | None],
    sums: queue.SimpleQueue[Sequence[int] | BaseException],
) -> None:
    """Sum what is asked for, one vote after another, until None is."""
    while (numbers := asked.get()) is not None:
        try:
            sums.put(_sum_over_tree(numbers, to_parent, to_children))
        except BaseException as error:
            sums.put(error)


def _sum_over_tree(numbers: Sequence[int], to_parent: Any, to_children: Any) -> Sequence[int]:
    """Return the sums: the children's are added and passed to the parent, and the totals of all come back."""
    total = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    children = range(1, to_children.size()) if to_children is not None else range(0)
    parts = [torch.empty_like(total) for _ in children]
    waiting = [to_children.recv([part], child, 0) for child, part in zip(children, parts, strict=True)]
    for work, part in zip(waiting, parts, strict=True):
        work.wait()
        total += part
    if to_parent is not None:
        to_parent.send([total], 0, 0).wait()
        to_parent.recv([total], 0, 0).wait()
    for work in [to_children.send([total], child, 0) for child in children]:
        work.wait()
    sums: list[int] = total.tolist()
    return sums


def parents(machines: Sequence[int]) -> list[int | None]:
    """Return the parent of each rank in a tree whose root is rank 0.

    The processes of a machine are below its first one, and the first ones of all machines below rank 0. Each has at
    most 8 children of its machine and 8 of others.

    Args:
        machines: The number of each rank's machine.
    """
    ranks: dict[int, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    found: list[int | None] = [None] * len(machines)
    for each in ([first for first, *_ in ranks.values()], *ranks.values()):
        for place, rank in enumerate(each[1:]):
            found[rank] = each[place // _CHILDREN]
    return found


def make_tree_vote(
    rank: int, machines: Sequence[int], join: Callable[[str, Sequence[int]], Any], watched: Watched
) -> Vote:
    """Return votes over a tree. Collective.

    Args:
        rank: Rank of this process.
        machines: The number of each rank's machine.
        join: Joins a gloo group with a name and these ranks. Collective for them.
        watched: Encloses calls that wait for other processes.
    """
    parent_of = parents(machines)

    def family(parent: int) -> Any:
        children = [each for each, above in enumerate(parent_of) if above == parent]
        return join(str(parent), [parent, *children]) if children else None

    parent = parent_of[rank]
    return TreeVote(None if parent is None else family(parent), family(rank), watched)


def next_name() -> str:
    """Return a name for the groups of a new vote, which differs from all others that this process returned."""
    return f"votes/{next(_numbers)}"


def join_group(store: Store, name: str, rank: int, ranks: Sequence[int], timeout: float) -> Any:
    """Join a gloo group of some processes, apart from those that torch knows. Collective for them.

    Args:
        store: A store that all of them reach.
        name: The name of the group.
        rank: Rank of this process.
        ranks: The ranks of the group's processes.
        timeout: Seconds after which a vote fails.
    """
    prefixed = PrefixStore(name, store)
    return dist.ProcessGroupGloo(prefixed, [*ranks].index(rank), len(ranks), timedelta(seconds=timeout))


def _leak(*objects: Any) -> None:
    """Keep objects for ever: freeing a group waits for its votes, and so might the end of the process."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))

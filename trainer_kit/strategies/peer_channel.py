"""`PeerChannel`: exchanges between the processes of a run in a thread, while training continues."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer_kit.strategies.connections import Connections
from trainer_kit.strategies.process_group import failed_to_communicate


class PeerChannel:
    """Exchanges over connections of their own, so that no other collective waits for one.

    After an error the channel is broken: close it, and open another one.

    Args:
        group: A gloo group of all processes, which this object owns.
        machines: The number of each rank's machine.
        connections: The connections of the group.

    Attributes:
        peers: Rank to which each rank sends, from `peers_of`.
    """

    def __init__(self, group: Any, machines: Sequence[int], connections: Connections) -> None:
        self.peers = peers_of(machines)
        self._group = group
        self._connections = connections
        # Kept, so that no thread of the group frees the last ones, for which it needs Python.
        self._recent: deque[list[torch.Tensor]] = deque(maxlen=4)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank; each is a JSON tree. Collective.

        Raises:
            OSError: If another process has left, or does not answer.
        """
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(each) for each in self._all_gather(torch.tensor([len(content)], device="cpu"))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(content)] = content
        parts = zip(self._all_gather(padded), sizes, strict=True)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in parts]

    def exchange(self, sent: torch.Tensor | None, received: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to this process's peer, and receive those of other processes, all at the same time.

        Args:
            sent: A tensor on the host; None: nothing.
            received: Tensors to fill, by the rank that sends each.

        Raises:
            OSError: If another process has left, or does not answer.
        """
        self._recent.append([*([] if sent is None else [sent]), *received.values()])
        with _as_os_error():
            works = [self._group.recv([tensor], rank, 0) for rank, tensor in received.items()]
            if sent is not None:
                works.append(self._group.send([sent], self.peers[self._group.rank()], 0))
            for work in works:
                work.wait()

    def break_off(self) -> None:
        """Let what waits for other processes fail, here and there."""
        self._connections.break_off()

    def close(self) -> None:
        """Release the connections; no exchange may be under way."""
        self._group = None  # before the tensors: ends the group's threads

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._recent.append([tensor, *parts])
        with _as_os_error():
            self._group.allgather([parts], [tensor]).wait()
        return parts


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Enclose calls of a group, whose failures become OSErrors."""
    try:
        yield
    except RuntimeError as error:
        if not failed_to_communicate(error):
            raise
        raise OSError(f"another process left, or did not answer ({error})") from error


def peers_of(machines: Sequence[int]) -> list[int | None]:
    """Return the rank to which each rank sends: the one in the same place half of the machines further on.

    Machines that stand side by side may share what fails, such as a rack.

    Args:
        machines: The number of each rank's machine.

    Returns:
        A rank on another machine for each rank; None for all if there is only one machine.
    """
    ranks: dict[int, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    groups = [ranks[machine] for machine in sorted(ranks)]
    found: list[int | None] = [None] * len(machines)
    if len(groups) > 1:
        for number, group in enumerate(groups):
            others = groups[(number + len(groups) // 2) % len(groups)]
            for place, rank in enumerate(group):
                found[rank] = others[place % len(others)]
    return found

"""What the processes of a run say to one another on the host: rendezvous, collectives, and who was told to leave."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from trainer_kit.config.environment import Place
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.process_group import Session, failed_to_communicate

T = TypeVar("T")
# Kept, so that the last ones are not freed by a thread of the group while the process ends: see `ddp.shut_down`.
_recent_numbers: deque[list[torch.Tensor]] = deque(maxlen=8)


class Processes(Strategy):
    """The part of a strategy that meets the other processes and talks to them.

    Args:
        place: This process among those that a launcher started.
        timeout: Seconds after which a collective ends with an error because some process has not come to it.
        patience: Seconds after which a process that does not answer is taken for lost.
        others: For the next class.
    """

    def __init__(self, place: Place, timeout: float, patience: float, *others: Any) -> None:
        super().__init__(*others)
        self.place = place
        self.timeout = timeout
        self.patience = patience
        self._session: Session | None = None

    @property
    def is_alone(self) -> bool:
        return self.place.world_size == 1

    def setup(self) -> None:
        """Meets the other processes; a process group that the program has made already is used.

        Raises:
            ValueError: If they cannot meet: nobody answers, a port is in use, or processes are missing.
        """
        super().setup()
        if self._session is not None:
            self._session.recover()
        elif not self.is_alone:
            self._session = Session.join(self.place, self.device, self.timeout, self.patience, self._location())
            self._have_met()

    def _location(self) -> tuple[str, str]:
        """The machine of this process and its device."""
        return socket.gethostname(), str(self.device)

    def _have_met(self) -> None:
        """Called once, when all processes are there."""

    def teardown(self, error: BaseException | None = None) -> None:
        super().teardown(error)
        if self._session is not None:
            self._session.end_training(error)

    def _named(self, rank: int) -> str:
        """A process, in an error."""
        return f"rank {rank}"

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if self.is_alone:
            return tensor
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)  # backends sum in the order of memory
        with self._watched():
            dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return tensor

    def sum_numbers(self, numbers: Sequence[int]) -> Sequence[int]:
        if self.is_alone:
            return numbers
        # Gathered, since gloo takes less than half the time for that than for reducing; on the host, since nobody
        # shall wait for a GPU.
        tensor = torch.tensor(numbers, dtype=torch.int64)
        parts = self._all_gather(tensor)
        _recent_numbers.append([tensor, *parts])
        return [sum(column) for column in zip(*(part.tolist() for part in parts), strict=True)]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_alone:
            return tensor
        tensor = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
        lengths = [int(part) for part in self._all_gather(torch.tensor([tensor.shape[0]]))]
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        # As bytes: not every backend knows every dtype.
        parts = self._all_gather(padded.reshape(-1).view(torch.uint8))
        rows = [part.view(tensor.dtype).reshape(padded.shape) for part in parts]
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def gather_object(self, value: T) -> list[T]:
        return self._gathered(value)

    def _gathered(self, value: T) -> list[T]:
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.place.world_size
        with self._watched():
            dist.all_gather_object(values, value)
        return values

    def gather_to_main(self, value: T) -> list[T]:
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.place.world_size if self.is_main else []
        with self._watched():
            dist.gather_object(None if self.is_main else value, values or None)
        return [value, *values[1:]] if self.is_main else []

    def broadcast(self, value: T) -> T:
        if self.is_alone:
            return value
        values = [value]
        with self._watched():
            dist.broadcast_object_list(values, 0)
        return values[0]

    def barrier(self) -> None:
        self.sum_numbers([0])

    def on_main(self, function: Callable[[], T]) -> T:
        if self.is_alone:
            return function()
        outcome: tuple[T | None, BaseException | None] = (None, None)
        if self.is_main:
            try:
                outcome = (function(), None)
                pickle.dumps(outcome[0])
            except BaseException as error:  # the others must not wait for ever
                self.broadcast((None, _portable(error)))
                raise
        value, raised = self.broadcast(outcome)
        if raised is not None:
            raise raised
        return cast("T", value)

    def check_same(self, facts: Mapping[str, Any]) -> None:
        if self.is_alone:
            return
        if len(set(self._gathered(xxhash.xxh3_64_hexdigest(repr([*facts.items()]).encode())))) == 1:
            return  # without sending the names of all parameters to everyone
        main, *others = self._gathered(dict(facts))
        for rank, other in enumerate(others, start=1):
            for name in [*main, *other]:
                ours, theirs = main.get(name, "nothing"), other.get(name, "nothing")
                if ours != theirs:
                    raise ValueError(
                        f"{name} differs: {theirs!r} on {self._named(rank)}, {ours!r} on {self._named(0)}; start every "
                        "process with the same script, arguments and versions"
                    )
            for name, there in zip(main, other, strict=True):
                if name != there:
                    raise ValueError(
                        f"{there} on {self._named(rank)} stands where {name} does on {self._named(0)}: the same things "
                        "in another order; make them in the same order in every process (that of a set of strings "
                        "changes from process to process: sort it, or give all processes the same PYTHONHASHSEED)"
                    )

    @property
    def leaving(self) -> bool:
        return self._leaving or (self._session is not None and self._session.heartbeat.leaving)

    def announce_leaving(self) -> None:
        super().announce_leaving()
        if self._session is not None:
            self._session.heartbeat.announce_leaving()

    def before_aborting(self, duty: Callable[[], object] | None) -> None:
        if self._session is not None:
            self._session.heartbeat.last_duty = duty

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.place.world_size)]
        with self._watched():
            dist.all_gather(parts, tensor)
        return parts

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Something in which this process may wait for others: where it fails, the error says for whom."""
        session = self._session
        if session is None:
            assert self.is_alone, "setup() comes first"
            yield
            return
        session.heartbeat.calls += 1
        try:
            yield
        except RuntimeError as error:
            if not failed_to_communicate(error):
                raise
            raise LostProcessError(session.heartbeat.explain(error)) from error


multiprocessing.util.Finalize(None, Session.leave, exitpriority=9)  # at the end of a multiprocessing child too


def _portable(error: BaseException) -> BaseException:
    """The error itself, or its text where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its __reduce__ does
        return RuntimeError(f"on rank 0: {type(error).__name__}: {error}")
    return error

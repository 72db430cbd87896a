"""Facts about the processes of a run, and execution on selected ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from trainer_kit.accelerator.unavailable import no_member
from trainer_kit.accelerator.utils.enums import DistributedType
from trainer_kit.strategies.base import Strategy

T = TypeVar("T")


class ProcessFacts:
    """What `Accelerator` and `PartialState` know of this process and the others.

    Attributes:
        strategy: Strategy that is set up.
    """

    strategy: Strategy

    def __getattr__(self, name: str) -> Any:
        raise no_member(self, name, *(kind.__name__ for kind in type(self).__mro__))

    # Identity of this process

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.distributed_type.value}, process {self.process_index} of "
            f"{self.num_processes}, local process {self.local_process_index}, device {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Device of models and batches."""
        return self.strategy.device

    @property
    def num_processes(self) -> int:
        """Number of all processes."""
        return self.strategy.world_size

    @property
    def process_index(self) -> int:
        """Global rank of this process, from 0."""
        return self.strategy.rank

    @property
    def local_process_index(self) -> int:
        """Local rank of this process on its machine, from 0."""
        return self.strategy.collectives.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self.strategy.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.strategy.collectives.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether the run has several processes or devices."""
        return self.num_processes > 1 or self.strategy.devices > 1

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of devices that the run is distributed over."""
        if self.device.type == "xla":
            return DistributedType.XLA
        if self.num_processes == 1:
            return DistributedType.NO
        if self.strategy.sharding.is_active:
            return DistributedType.FSDP
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    # Execution on selected processes

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Decorate a function to run on the main process only; it returns None on the others."""
        return _only_if(self.is_main_process, function)

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Decorate a function to run on the last process only; it returns None on the others."""
        return _only_if(self.is_last_process, function)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Decorate a function to run on each machine's first process only; it returns None on the others."""
        return _only_if(self.is_local_main_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
        """Decorate a function to run on one process only; it returns None on the others.

        A single process runs it whatever the index, as under accelerate.

        Args:
            function: Function to decorate; None returns a decorator.
            process_index: Global rank of the process.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_if(process_index == self.process_index or self.num_processes == 1, function)

    def on_local_process(self, function: Callable[..., Any] | None = None, local_process_index: int = 0) -> Any:
        """Decorate a function to run on one process of each machine only; it returns None on the others.

        A single process runs it whatever the index, as under accelerate.

        Args:
            function: Function to decorate; None returns a decorator.
            local_process_index: Local rank of the process.
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only_if(local_process_index == self.local_process_index or self.num_processes == 1, function)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the main process run the block before all others, for example to fill a cache."""
        with self.strategy.collectives.going_first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first process of each machine run the block before the others."""
        with self.strategy.collectives.going_first(self.is_local_main_process):
            yield

    def wait_for_everyone(self) -> None:
        """Wait until all processes have arrived. Collective."""
        self.strategy.barrier()

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Enter a context with this process's part of the inputs, for example of prompts.

        Args:
            inputs: List, tuple, tensor, `datasets.Dataset`, or a dict of them (or of such dicts) with equal lengths.
                The first processes get one element more if the number of processes does not divide them.
            apply_padding: Whether to repeat the last element so that all parts have the same length; a tensor's part
                is then on the device.

        Yields:
            The part, of the same type; anything else unchanged.

        Raises:
            ValueError: If the lengths in a dict differ.
        """
        if self.num_processes == 1:
            yield inputs
            return
        lengths = _lengths(inputs) if isinstance(inputs, dict) else {}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"split_between_processes() got values of different lengths: {lengths}; make them equal")
        yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, pads: bool) -> Any:
        if isinstance(inputs, dict):
            return {key: self._part(value, pads) for key, value in inputs.items()}
        is_dataset = hasattr(inputs, "select") and hasattr(inputs, "column_names")  # of the package datasets
        if not is_dataset and not isinstance(inputs, (list, tuple, torch.Tensor)):
            return inputs
        size, extra = divmod(len(inputs), self.num_processes)
        start = self.process_index * size + min(self.process_index, extra)
        rows = [*range(start, start + size + (self.process_index < extra))]
        if pads and len(inputs):
            rows += [len(inputs) - 1] * (size + (extra > 0) - len(rows))
        if is_dataset:
            return inputs.select(rows)
        if isinstance(inputs, torch.Tensor):
            part = inputs[torch.tensor(rows, dtype=torch.long, device=inputs.device)]
            return part.to(self.device) if pads else part
        return type(inputs)(inputs[row] for row in rows)


def _lengths(inputs: dict[Any, Any], path: str = "") -> dict[str, int]:
    """Return the length of each value in a dict and its inner dicts, by keys joined with dots."""
    found: dict[str, int] = {}
    for key, value in inputs.items():
        found |= _lengths(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": len(value)}
    return found


def _only_if(condition: bool, function: Callable[..., T]) -> Callable[..., T | None]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if condition else None

    return wrapper

"""Facts about the processes of a run, and collective operations, for an Accelerator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch

from trainer_kit.accelerator.options import DistributedType
from trainer_kit.accelerator.wrappers import AccumulationState
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import keys, map_tensors, tensors
from trainer_kit.utils.user_warnings import warn

T = TypeVar("T")


class ProcessInfo:
    """The part of an `Accelerator` that needs its strategy only.

    Args:
        strategy: Strategy that is set up.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.flow = AccumulationState(strategy)
        self._triggered = False

    # Identity of this process

    @property
    def state(self) -> ProcessInfo:
        """The object itself: accelerate's scripts read the facts of the run from `state`."""
        return self

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
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first process of each machine run the block before the others."""
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def wait_for_everyone(self) -> None:
        """Wait until all processes have arrived. Collective."""
        self.strategy.barrier()

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on all processes."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether any process has called `set_trigger` since the last check. Collective."""
        (count,) = self.strategy.collectives.all_reduce_ints([int(self._triggered)])
        self._triggered = False
        return count > 0

    # Collectives over tensors

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along the first dimension, in rank order; lengths may differ.

        Args:
            tensor: A tensor or a tree of tensors; a tensor without dimensions is treated as one of length 1.

        Returns:
            The concatenated tensors, in a tree of the same structure.

        Raises:
            TypeError: If the tree holds something other than tensors.
        """
        _check_tensors(tensor, "gather")
        return _in_one_order(lambda each: self.strategy.gather(each if each.ndim else each[None]), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the samples that were repeated to fill a loader's last batches.

        The loader is the innermost prepared one that is being iterated. A tree that holds other things than tensors is
        gathered as Python objects: lists and tuples are concatenated, anything else becomes one element per process.

        Args:
            input_data: One row (or element) per sample of this process's batch.
            use_gather_object: Whether to gather tensors as Python objects too.

        Returns:
            Tensors as from `gather`, or a list of Python objects.
        """
        if self.strategy.static_shapes:
            self.flow.dispatch()  # the graph so far is the same with and without repeats
        loaders = self.flow.loaders
        rows, real = (loaders[-1].rows, loaders[-1].real) if loaders else (0, 0)
        if not use_gather_object and _foreign(input_data) is None:
            devices = self.strategy.devices
            return self.gather(map_tensors(lambda each: _without_repeats(each, rows, real, devices), input_data))
        if isinstance(input_data, (list, tuple)):
            own = list(input_data)
            own = own[:real] if len(own) == rows else own if real or not loaders else []
        else:
            own = [input_data] if real or not loaders else []
        return [each for part in self.strategy.collectives.gather_object(own) for each in part]

    def reduce(self, tensor: Any, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> Any:
        """Return the elementwise sum or mean of the tensors of all processes.

        Args:
            tensor: A tensor or a tree of tensors, with the same shapes on all processes.
            reduction: "sum", "mean", or "none", which returns the tensors unchanged.
            scale: Factor applied to the result.

        Returns:
            The reduced tensors, in a tree of the same structure.

        Raises:
            ValueError: If `reduction` is none of the three.
            TypeError: If the tree holds something other than tensors.
        """
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction={reduction!r} is not known; use 'sum', 'mean' or 'none'")
        _check_tensors(tensor, "reduce")

        def reduced(each: torch.Tensor) -> torch.Tensor:
            if reduction == "none":
                return each
            total = self.strategy.collectives.all_reduce(each.detach().clone())
            if reduction == "mean" and self.num_processes > 1:
                total = total / self.num_processes
            return total if scale == 1.0 else total * scale

        return _in_one_order(reduced, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad the tensors along one dimension to the largest size on any process.

        Args:
            tensor: A tensor or a tree of tensors; tensors without this dimension stay unchanged.
            dim: Dimension to pad; negative values count from the last.
            pad_index: Padding value.
            pad_first: Whether to pad before the content instead of after it.

        Returns:
            The padded tensors, in a tree of the same structure.

        Raises:
            TypeError: If the tree holds something other than tensors.
        """
        _check_tensors(tensor, "pad_across_processes")
        if self.num_processes == 1:
            return tensor

        def padded(each: torch.Tensor) -> torch.Tensor:
            if not -each.ndim <= dim < each.ndim:
                return each
            own = each.shape[dim]
            size = int(self.strategy.collectives.all_reduce(torch.tensor([own], device=self.device), "max"))
            if size == own:
                return each
            shape = list(each.shape)
            shape[dim] = size
            whole = each.new_full(shape, pad_index)
            whole.narrow(dim, size - own if pad_first else 0, own).copy_(each)
            return whole

        return _in_one_order(padded, tensor)


def _only_if(condition: bool, function: Callable[..., T]) -> Callable[..., T | None]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if condition else None

    return wrapper


def _in_one_order(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Map the tensors like `map_tensors`, in sorted key order: the order of dicts may differ between processes."""
    results = {id(tensor): function(tensor) for tensor in tensors(_sorted(tree))}
    return map_tensors(lambda tensor: results[id(tensor)], tree)


def _sorted(tree: Any) -> Any:
    """Return a tree whose dicts are sorted by key."""
    if isinstance(tree, Mapping):
        return {key: _sorted(tree[key]) for key in sorted(keys(tree), key=lambda key: (str(type(key)), str(key)))}
    return [_sorted(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def _foreign(tree: Any) -> type | None:
    """Return the type of the first leaf that is not a tensor; None if all are tensors."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return type(tree)
    return next((found for each in tree if (found := _foreign(each)) is not None), None)


def _check_tensors(tree: Any, name: str) -> None:
    if (found := _foreign(tree)) is not None:
        raise TypeError(
            f"{name}() got a {found.__name__}; give a tensor, or a tree of tensors (gather_for_metrics takes other "
            "objects too)"
        )


def _without_repeats(tensor: torch.Tensor, rows: int, real: int, devices: int) -> torch.Tensor:
    """Return the part of a batch's results that belongs to its first `real` rows."""
    if real == rows:
        return tensor
    tensor = tensor if tensor.ndim else tensor[None]
    length = tensor.shape[0]
    if real == 0 or length * devices % rows == 0:  # one or more rows per sample, or per sample of one device
        return tensor[: -(-length * real // rows)]
    if length > 1:  # a scalar stands for the batch; an error would hang the other processes
        warn(
            f"gather_for_metrics got {length} rows for a batch of {rows} samples, of which {rows - real} are repeats "
            "that it cannot tell; give it a row for each sample",
        )
    return tensor

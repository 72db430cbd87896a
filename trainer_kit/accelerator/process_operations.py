"""Collective operations on trees of tensors, for an Accelerator and for `PartialState`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch

from trainer_kit.accelerator.process_facts import ProcessFacts
from trainer_kit.errors import DistributedOperationException
from trainer_kit.utils.pytree import keys, map_tensors, tensors

T = TypeVar("T")


class ProcessOperations(ProcessFacts):
    """Collective operations of this process with the others."""

    debug: bool = False
    """Whether shapes are compared before each operation."""

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along the first dimension, in rank order; lengths may differ.

        Args:
            tensor: A tensor or a tree of tensors; a tensor without dimensions is treated as one of length 1.

        Returns:
            The concatenated tensors, in a tree of the same structure.

        Raises:
            TypeError: If the tree holds something other than tensors.
        """
        self._check("gather", tensor, compares=False)
        return _in_one_order(lambda each: self.strategy.gather(each if each.ndim else each[None]), tensor)

    def reduce(self, tensor: Any, reduction: Literal["sum", "mean", "max", "none"] = "sum", scale: float = 1.0) -> Any:
        """Return the elementwise sum, mean or maximum of the tensors of all processes.

        Args:
            tensor: A tensor or a tree of tensors, with the same shapes on all processes.
            reduction: "sum", "mean", "max", or "none", which returns the tensors unchanged.
            scale: Factor applied to the result.

        Returns:
            The reduced tensors, in a tree of the same structure.

        Raises:
            ValueError: If `reduction` is none of these.
            TypeError: If the tree holds something other than tensors.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise ValueError(f"reduction={reduction!r} is not known; use 'sum', 'mean', 'max' or 'none'")
        self._check("reduce", tensor)

        def reduced(each: torch.Tensor) -> torch.Tensor:
            if reduction == "none":
                return each
            total = self.strategy.collectives.all_reduce(each.detach().clone(), "max" if reduction == "max" else "sum")
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
        self._check("pad_across_processes", tensor, only_rank=True)
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

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Fill the tensors with the values of one process, in place, and return them. Collective.

        Args:
            tensor: A tensor or a tree of tensors, of the same structure and shapes on all processes.
            from_process: Rank of the process that sends.

        Raises:
            TypeError: If the tree holds something other than tensors.
            ValueError: If a shape differs from that on the process that sends.
        """
        self._check("broadcast", tensor)

        def fill(each: torch.Tensor) -> torch.Tensor:
            sent = self._from(each.detach().cpu(), from_process)
            if sent.shape != each.shape:
                raise ValueError(
                    f"broadcast() got a tensor of the shape {list(each.shape)}, which is {list(sent.shape)} on process "
                    f"{from_process}; give tensors of the same shape"
                )
            return each if self.process_index == from_process else each.copy_(sent)

        with torch.no_grad():
            return tensor if self.num_processes == 1 else _in_one_order(fill, tensor)

    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """Replace the elements of a list by those of one process, in place, and return the list. Collective.

        Args:
            object_list: Picklable objects; as many on all processes.
            from_process: Rank of the process that sends.
        """
        object_list[:] = self._from(object_list, from_process)
        return object_list

    def gather_object(self, object: Any) -> Any:
        """Concatenate the lists of all processes, in rank order. Collective.

        Args:
            object: A list or tuple of picklable objects.

        Raises:
            TypeError: If it is neither.
        """
        if not isinstance(object, (list, tuple)):
            raise TypeError(f"gather_object() got a {type(object).__name__}; give a list, such as [value]")
        if self.num_processes == 1:
            return object
        return [each for part in self.strategy.collectives.gather_object([*object]) for each in part]

    def _from(self, value: T, rank: int) -> T:
        """Return the value of the process with this rank."""
        if not 0 <= rank < self.num_processes:
            raise ValueError(f"from_process={rank} is not one of the {self.num_processes} processes")
        collectives = self.strategy.collectives
        return collectives.broadcast(value) if rank == 0 else collectives.gather_object(value)[rank]

    def _check(self, name: str, tree: Any, compares: bool = True, only_rank: bool = False) -> None:
        """Check that a tree holds only tensors, and in debug mode that all processes have equal shapes."""
        if (found := foreign(tree)) is not None:
            raise TypeError(
                f"{name}() got a {found.__name__}; give a tensor, or a tree of tensors (gather_for_metrics takes other "
                "objects too)"
            )
        if not (self.debug and compares) or self.num_processes == 1:
            return
        shapes = [each.ndim if only_rank else list(each.shape) for each in tensors(_sorted(tree))]
        everywhere = self.strategy.collectives.gather_object(shapes)
        if any(other != shapes for other in everywhere):
            raise DistributedOperationException(
                f"{name}() got tensors that differ between the processes, by rank: {everywhere}; give all of them "
                f"{'the same number of dimensions' if only_rank else 'the same shapes'}"
            )


def _in_one_order(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Map the tensors like `map_tensors`, in sorted key order: the order of dicts may differ between processes."""
    results = {id(tensor): function(tensor) for tensor in tensors(_sorted(tree))}
    return map_tensors(lambda tensor: results[id(tensor)], tree)


def _sorted(tree: Any) -> Any:
    """Return a tree whose dicts are sorted by key."""
    if isinstance(tree, Mapping):
        return {key: _sorted(tree[key]) for key in sorted(keys(tree), key=lambda key: (str(type(key)), str(key)))}
    return [_sorted(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def foreign(tree: Any) -> type | None:
    """Return the type of the first leaf that is not a tensor; None if all are tensors."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return type(tree)
    return next((found for each in tree if (found := foreign(each)) is not None), None)

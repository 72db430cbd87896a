"""`Tracker`: follows every storage that a step makes, from its birth to its end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Hidden = Callable[[Any, Any, Any], int]
"""Bytes that an operator takes for itself while it computes, from the operator, its arguments and its result."""

_UNTOLD = ("temporary", "activations")
"""What a storage is until it is told that it is something else."""

_NO_BACKWARD = -1


class _Allocation:
    """The memory of a storage, and what it is used for."""

    __slots__ = ("kind", "nbytes")

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes = nbytes
        self.kind = kind


class Tracker(TorchDispatchMode):
    """Follows the storages of all tensors that operators return, each once however many tensors share it.

    What a storage is used for may become known after its birth (a gradient is one when it is put in its place), so
    all births and ends are kept, and the peak is looked for afterwards.

    Args:
        granularity: A storage takes a multiple of so many bytes, as the device's allocator gives them out.
        hidden: What operators take for themselves, which is not seen here.
    """

    def __init__(self, granularity: int = 1, hidden: Hidden | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._granularity = granularity
        self._hidden = hidden
        self._alive: dict[int, _Allocation] = {}
        self._events: list[tuple[_Allocation, int]] = []
        self._from_start: set[_Allocation] = set()
        self._finalizers: list[weakref.finalize[Any, Any]] = []

    def mark(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Says what the storages of tensors are used for; one that was not seen before is born now."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._block(part, kind).kind = kind

    def move_to_start(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Marks tensors that a first step has made, and counts them as they are in later ones: there from the start."""
        for tensor in tensors:
            for part in _parts(tensor):
                block = self._block(part, kind)
                block.kind = kind
                self._from_start.add(block)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """The context of a step: what autograd saves for the backward pass is an activation."""
        with self, torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor):
            yield

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        for part in _parts(tensor):
            block = self._block(part, "activations")
            if block.kind in _UNTOLD:
                block.kind = "activations"
        return tensor

    def peak(self) -> dict[str, int]:
        """Bytes by what they are used for, at the moment when most memory was in use."""
        events = [(block, 1) for block in self._from_start]
        events += [(block, sign) for block, sign in self._events if block not in self._from_start]
        now = most = end = 0
        for number, (block, sign) in enumerate(events, start=1):
            now += sign * block.nbytes
            if now > most:
                most, end = now, number
        sizes: dict[str, int] = {}
        for block, sign in events[:end]:
            sizes[block.kind] = sizes.get(block.kind, 0) + sign * block.nbytes
        return {kind: nbytes for kind, nbytes in sizes.items() if nbytes}

    def close(self) -> None:
        """Lets go of the storages that live on."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:  # of a real tensor among fake ones it seems to have memory of its own
            return result
        kind = self._kind_of_result(func, args)
        for leaf in tree_leaves(result):
            for part in _parts(leaf):
                self._block(part, kind)
        if self._hidden is not None and (nbytes := self._hidden(func, args, result)):
            block = _Allocation(nbytes, "temporary")
            self._events += [(block, 1), (block, -1)]
        return result

    def _kind_of_result(self, func: Any, args: Any) -> str:
        if func is torch.ops.aten._to_copy.default:
            block = self._alive.get(args[0].untyped_storage()._cdata)
            if block is not None and block.kind == "weights":
                return "casts"
        # With gradients on in a backward pass, activations are computed again: what is saved of them has other hooks.
        is_again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != _NO_BACKWARD
        return "activations" if is_again else "temporary"

    def _block(self, tensor: torch.Tensor, kind: str) -> _Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._alive.get(key)
        if block is None:
            nbytes = -(-storage.nbytes() // self._granularity) * self._granularity
            block = self._alive[key] = _Allocation(nbytes, kind)
            self._events.append((block, 1))
            self._finalizers.append(weakref.finalize(storage, self._end, key))
        return block

    def _end(self, key: int) -> None:
        self._events.append((self._alive.pop(key), -1))


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors in which a tensor keeps its numbers."""
    if not isinstance(tensor, torch.Tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if is_traceable_wrapper_subclass(tensor):  # such as the states of 8-bit optimizers
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [tensor] if tensor.layout is torch.strided else []

"""`Tracker`: follows every storage that a step creates, from its allocation to its release."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from trainer_kit.memory.sharding import Sharding
from trainer_kit.strategies.activation_checkpointing import watching_kept_results
from trainer_kit.utils.pytree import tensors

Hidden = Callable[[Any, Any, Any], int]
"""Returns the bytes that an operator holds internally, from the operator, its arguments and its result."""

_SHARDED = ("weights", "gradients", "optimizer")
"""Kinds of storages of which each process holds a part, if the model is sharded."""

_UNTOLD = ("temporary", "activations")
"""Kinds of storages that are not marked yet."""

_NO_BACKWARD = -1
_WHOLE = Sharding()


class _Allocation:
    """Memory of a storage, its kind, and whether an optimizer update created it."""

    __slots__ = ("in_update", "kind", "nbytes")

    def __init__(self, nbytes: int, kind: str, in_update: bool = False) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.in_update = in_update


class Tracker(TorchDispatchMode):
    """Dispatch mode that follows the storages of all tensors that operators return, each storage once.

    The kind of a storage may become known after its allocation (a gradient, for example, when it is assigned). The
    tracker therefore records all allocations and releases, and finds the peak afterwards.

    Args:
        granularity: Allocation size of the device's allocator, in bytes; each storage takes a multiple of it.
        hidden: Internal memory of operators, which the tracker cannot see; None for none.
        sharding: How the model is sharded. The tracked step is that of one process with the whole model; the peak is
            that of one of the processes that share it.
    """

    def __init__(self, granularity: int = 1, hidden: Hidden | None = None, sharding: Sharding = _WHOLE) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._granularity = granularity
        self._hidden = hidden
        self._sharding = sharding
        self._gathered = _Allocation(sharding.gathered, "gathered")
        self._in_update = False
        self._alive: dict[int, _Allocation] = {}
        self._events: list[tuple[_Allocation, int]] = []
        self._from_start: set[_Allocation] = set()
        self._finalizers: list[weakref.finalize[Any, Any]] = []

    def mark(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Set the kind of the tensors' storages; a storage that is not known yet counts as allocated now.

        Args:
            kind: One of `KINDS`.
            tensors: Tensors to mark; None entries are skipped.
        """
        for tensor in tensors:
            for part in _parts(tensor):
                self._block(part, kind).kind = kind

    def move_to_start(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors that a first step has created, and count them from the start, as in later steps.

        Args:
            kind: One of `KINDS`.
            tensors: Tensors to mark.
        """
        for tensor in tensors:
            for part in _parts(tensor):
                block = self._block(part, kind)
                block.kind = kind
                self._from_start.add(block)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Enter the context of a step: tensors that autograd saves for the backward pass are activations."""
        self._events.append((self._gathered, 1))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
        with self, hooks, watching_kept_results(lambda result: self.mark("activations", tensors(result))):
            yield

    def begin_update(self) -> None:
        """Note that backward passes have ended: gathered units are released, and the optimizer works on shards."""
        self._events.append((self._gathered, -1))
        self._in_update = True

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        for part in _parts(tensor):
            block = self._block(part, "activations")
            if block.kind in _UNTOLD:
                block.kind = "activations"
        return tensor

    def peak(self) -> dict[str, int]:
        """Return the bytes by kind at the moment of the highest total memory."""
        events = [(block, 1) for block in self._from_start]
        events += [(block, sign) for block, sign in self._events if block not in self._from_start]
        now = most = end = 0
        for number, (block, sign) in enumerate(events, start=1):
            now += sign * self._nbytes(block)
            if now > most:
                most, end = now, number
        sizes: dict[str, int] = {}
        for block, sign in events[:end]:
            sizes[block.kind] = sizes.get(block.kind, 0) + sign * self._nbytes(block)
        return {kind: nbytes for kind, nbytes in sizes.items() if nbytes}

    def _nbytes(self, block: _Allocation) -> int:
        """Return the bytes of a storage on one of the processes that share the model."""
        if self._sharding.shards == 1:
            return block.nbytes
        if block.kind == "casts":  # weights are gathered in autocast's dtype
            return 0
        is_sharded = block.in_update or block.kind in _SHARDED
        return -(-block.nbytes // self._sharding.shards) if is_sharded else block.nbytes

    def close(self) -> None:
        """Stop tracking the remaining storages."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:  # a view of a real tensor among fake ones seems to have its own memory
            return result
        kind = self._kind_of_result(func, args)
        for leaf in tree_leaves(result):
            for part in _parts(leaf):
                self._block(part, kind)
        if self._hidden is not None and (nbytes := self._hidden(func, args, result)):
            block = _Allocation(nbytes, "temporary", self._in_update)
            self._events += [(block, 1), (block, -1)]
        return result

    def _kind_of_result(self, func: Any, args: Any) -> str:
        if func is torch.ops.aten._to_copy.default:
            block = self._alive.get(args[0].untyped_storage()._cdata)
            if block is not None and block.kind == "weights":
                return "casts"
        # Gradients enabled in a backward pass mean recomputation: other hooks see its saved tensors.
        is_again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != _NO_BACKWARD
        return "activations" if is_again else "temporary"

    def _block(self, tensor: torch.Tensor, kind: str) -> _Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._alive.get(key)
        if block is None:
            nbytes = -(-storage.nbytes() // self._granularity) * self._granularity
            block = self._alive[key] = _Allocation(nbytes, kind, self._in_update)
            self._events.append((block, 1))
            self._finalizers.append(weakref.finalize(storage, self._end, key))
        return block

    def _end(self, key: int) -> None:
        self._events.append((self._alive.pop(key), -1))


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that hold a tensor's data."""
    if not isinstance(tensor, torch.Tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if is_traceable_wrapper_subclass(tensor):  # such as the states of 8-bit optimizers
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [tensor] if tensor.layout is torch.strided else []

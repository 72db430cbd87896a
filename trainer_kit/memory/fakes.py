"""Copies of models and optimizers with fake tensors, which have shapes and no memory, and their execution mode."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainer_kit.utils.optimizer_state import copied_optimizer
from trainer_kit.utils.pytree import map_tensors, tensors

T = TypeVar("T", torch.nn.Module, torch.optim.Optimizer)

_KEPT_BY_LSTM = (10, 24)
"""Elements, and additional bytes, that oneDNN's LSTM keeps for the backward pass per element of its output (from its
workspace in torch 2.13; torch 2.9 keeps a quarter more); torch reports none."""

MOST_KNOWN = 2**20
"""Largest number of elements of a tensor whose values are computed."""


class Fakes:
    """Factory of fake tensors on the CPU, with a context in which they compute.

    Models branch on masks, lengths and labels. Integer and boolean tensors of up to a million elements are therefore
    computed for real, and so are single-element results. Where a model reads an unknown value, numbers are 1 and
    conditions False.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: list[Any] = []  # keeps their addresses, which are the keys, from being reused
        self._memo: dict[int, Any] = {}

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Enter the context in which fake tensors compute."""
        with self._mode, _Values():  # type: ignore[no-untyped-call]
            yield

    def copy(self, thing: T, keeps_known: bool = False) -> T:
        """Return a deep copy of a module or its optimizer with fake tensors; the original stays unchanged.

        Args:
            thing: Module or optimizer with real, fake or meta tensors. Tensors that share memory share it in the copy
                too.
            keeps_known: Whether small integer tensors keep their values, such as the place in a queue.

        Raises:
            ValueError: If a parameter has no shape yet (a lazy module).
        """
        for tensor in _tensors_of(thing):
            if id(tensor) not in self._memo:
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                plain = self._input if keeps_known else self.tensor
                self._memo[id(tensor)] = self._parameter(tensor) if is_parameter else plain(tensor)
                self._kept.append(tensor)
        if isinstance(thing, torch.optim.Optimizer):
            return copied_optimizer(thing, self._memo)
        return copy.deepcopy(thing, self._memo)

    def batch(self, batch: Any) -> Any:
        """Return a fake copy of a batch, with real values for small integer tensors (ones if they have no values)."""
        return map_tensors(self._input, batch)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the same shape, strides and dtype.

        Args:
            tensor: Real, fake or meta tensor.

        Raises:
            ValueError: If the tensor is lazy.
        """
        if is_lazy(tensor):
            raise ValueError("the model has a lazy module, whose weights have no shape yet; call it once before")
        storage = tensor.untyped_storage()
        with _disable_current_modes():
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
                self._kept.append(storage)
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
            return FakeTensor(self._mode, meta, torch.device("cpu"))

    def _parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.nn.Parameter(self.tensor(tensor), requires_grad=tensor.requires_grad)
        if not isinstance(tensor, FakeTensor):
            made.__dict__.update(tensor.__dict__)  # attributes that users set
        return made

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_whole(tensor) or tensor.numel() > MOST_KNOWN:
            return self.tensor(tensor)
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return tensor.detach().cpu().clone()


class _Values(TorchDispatchMode):
    """Mode that computes known values for real, and leaves the rest to the fake mode below it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return _with_fakes(func, args, kwargs)
        if func._schema.is_mutable:
            return _for_real(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return _for_real(func, args, kwargs)
        if all(_may_be_known(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            return _for_real(func, args, kwargs)
        return result


def _with_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    if func is torch.ops.aten._local_scalar_dense.default:
        dtype = args[0].dtype
        return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
    if func is torch.ops.aten.index.Tensor:
        args = (args[0], _without_masks(args[1]))
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped_product(*args, **kwargs)
    try:
        result = func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"what the model computes hangs on values that are not known before training ({func}), so that its memory "
            "cannot be estimated; measure() takes a real step"
        ) from error
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        output, *states, _ = result
        numbers, extra = _KEPT_BY_LSTM
        kept = output.new_empty(output.numel() * (numbers * output.itemsize + extra), dtype=torch.uint8)
        return output, *states, kept
    return result


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, ends: Any = None, bias: Any = None, dtype: Any = None
) -> torch.Tensor:
    """Return the shape of a grouped product (experts), which torch derives for bfloat16 only."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim:
        shape = [len(ends) if left.ndim == 2 else len(left), *shape]
    return left.new_empty(shape, dtype=dtype)


def _for_real(func: Any, args: Any, kwargs: Any) -> Any:
    with _disable_current_modes():
        return func(*args, **kwargs)


def _may_be_known(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 or (_is_whole(tensor) and tensor.numel() <= MOST_KNOWN)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _without_masks(indices: Any) -> list[Any]:
    """Replace masks with known values by the indices that they select."""
    replaced: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with _disable_current_modes():
                replaced += index.nonzero(as_tuple=True)
        else:
            replaced.append(index)
    return replaced


def _tensors_of(thing: torch.nn.Module | torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield every tensor that a module holds as an attribute, or an optimizer in its groups and its state."""
    if isinstance(thing, torch.nn.Module):
        for module in thing.modules():
            yield from tensors({name: value for name, value in vars(module).items() if name != "_modules"})
    else:
        yield from tensors([thing.param_groups, dict(thing.state)])

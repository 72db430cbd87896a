"""Operations on trees of tensors, collective ones by the process's own state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from trainer_kit.accelerator.concat import joined, row_count
from trainer_kit.accelerator.state import PartialState
from trainer_kit.errors import DistributedOperationException
from trainer_kit.utils.pytree import map_tensors, tensors

__all__ = [
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]


def gather(tensor: Any) -> Any:
    """See `Accelerator.gather`."""
    return PartialState().gather(tensor)


def gather_object(object: Any) -> Any:
    """Concatenate the lists of all processes, in rank order. Collective."""
    return PartialState().gather_object(object)


def reduce(tensor: Any, reduction: Literal["sum", "mean", "max", "none"] = "mean", scale: float = 1.0) -> Any:
    """See `Accelerator.reduce`; here the default is the mean, as in accelerate."""
    return PartialState().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """See `Accelerator.pad_across_processes`."""
    return PartialState().pad_across_processes(tensor, dim, pad_index, pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of one process. Collective."""
    return PartialState().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the elements of a list by those of one process, in place, and return the list. Collective."""
    return PartialState().broadcast_object_list(object_list, from_process)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the main process's tensor on this process's device; the others give None. Collective."""
    state = PartialState()
    (sent,) = state.broadcast_object_list([None if tensor is None else tensor.detach().cpu()])
    if sent is None:
        raise ValueError("copy_tensor_to_devices() got None on the main process; give the tensor there")
    return sent.to(state.device)  # type: ignore[no-any-return]


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Return a tree with its tensors, and other objects that have a method `to`, on a device.

    Args:
        tensor: A tensor, a tree of tensors, or an object with a method `to`.
        device: The device.
        non_blocking: See `torch.Tensor.to`.
        skip_keys: Keys of mappings whose values stay where they are.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if hasattr(tensor, "to"):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # its `to` takes no such argument
            return tensor.to(device)
    if isinstance(tensor, Mapping):
        moved = {
            key: value if key in skipped else send_to_device(value, device, non_blocking, skipped)
            for key, value in tensor.items()
        }
        return moved if type(tensor) is dict else type(tensor)(moved)  # type: ignore[call-arg]
    if isinstance(tensor, (list, tuple)):
        return honor_type(tensor, (send_to_device(each, device, non_blocking, skipped) for each in tensor))
    return tensor


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Concatenate batches of the same structure along a dimension.

    Raises:
        TypeError: If a leaf is no tensor.
    """
    first = data[0]
    if isinstance(first, (list, tuple)):
        return honor_type(first, (concatenate([each[place] for each in data], dim) for place in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([each[key] for each in data], dim) for key in first})  # type: ignore[call-arg]
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"concatenate() got a {type(first).__name__}; give batches of tensors")
    return joined(data) if dim == 0 else torch.cat(data, dim=dim)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return a tree with a slice of each tensor; the last two arguments have no effect."""
    return map_tensors(lambda each: each[tensor_slice], data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return a tree whose half-precision tensors are float32."""
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda each: each.float() if each.dtype in half else each, tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] | None = None,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves of a tree that pass a test.

    Args:
        func: Called with the leaf, `args` and `kwargs`.
        data: Tree of lists, tuples and mappings.
        args: Further arguments.
        test_type: The test; None: whether the leaf is a tensor.
        error_on_other_type: Whether another leaf is an error; otherwise it stays as it is.
        kwargs: Further arguments by name.

    Raises:
        TypeError: If a leaf does not pass the test, with `error_on_other_type`.
    """
    test = test_type or is_torch_tensor

    def applied(tree: Any) -> Any:
        if isinstance(tree, (list, tuple)):
            return honor_type(tree, map(applied, tree))
        if isinstance(tree, Mapping):
            return type(tree)({key: applied(value) for key, value in tree.items()})  # type: ignore[call-arg]
        if test(tree):
            return func(tree, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"a {type(tree).__name__} cannot be given to {getattr(func, '__name__', func)}")
        return tree

    return applied(data)


class TensorInformation(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Return a tree with the `TensorInformation` of its tensors in their place."""
    return recursively_apply(lambda each: TensorInformation(each.shape, each.dtype), data)


def get_shape(data: Any) -> Any:
    """Return a tree with the shapes of its tensors, as lists, in their place."""
    return recursively_apply(lambda each: list(each.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return a tree with an uninitialized tensor for each `TensorInformation`."""
    if is_tensor_information(data_structure):
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    if isinstance(data_structure, (list, tuple)):
        return honor_type(data_structure, map(initialize_tensors, data_structure))
    if isinstance(data_structure, Mapping):
        return {key: initialize_tensors(value) for key, value in data_structure.items()}
    return data_structure


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose outputs in half precision are float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


ConvertOutputsToFp32 = convert_outputs_to_fp32


def honor_type(obj: Any, generator: Any) -> Any:
    """Return the items of a generator as a list, tuple or named tuple like `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def is_namedtuple(data: Any) -> bool:
    """Return whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def find_batch_size(data: Any) -> int | None:
    """Return the size of the first tensor's first dimension; None without a tensor."""
    return row_count(data) if next(tensors(data), None) is not None else None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a tree; None without a tensor."""
    found = next(tensors(data), None)
    return None if found is None else found.device


def listify(data: Any) -> Any:
    """Return a tree with its tensors as lists of numbers."""
    return recursively_apply(lambda each: each.detach().cpu().tolist(), data)

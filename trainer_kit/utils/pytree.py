"""Operations on nested batches and states: mapping of tensors, and conversion of states to JSON and tensors."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

_TAG = "__kind__"
_NO_STATE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)


def map_tensors(function: Callable[[Any], Any], tree: Any, kind: type = torch.Tensor) -> Any:
    """Apply `function` to each tensor, or value of another `kind`, in nested mappings, lists, tuples and deques.

    Other values are kept.
    """
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, value, kind) for key, value in tree.items()}
        return mapped if type(tree) is dict else _like(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value, kind) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(function, value, kind) for value in tree])
    if isinstance(tree, deque):
        return deque((map_tensors(function, value, kind) for value in tree), tree.maxlen)
    return tree


def move(tree: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return the tree with its tensors on a device; an object with a method `to` (a TensorDict) moves itself.

    Args:
        tree: Nested dicts, lists, tuples and objects with tensors.
        device: Target device.
        non_blocking: Whether copies from page-locked memory may be asynchronous.
    """
    if isinstance(tree, torch.Tensor):
        return tree if tree.device == device else tree.to(device, non_blocking=non_blocking)
    if isinstance(tree, (dict, UserDict)):
        moved = {
            key: value if type(value) is torch.Tensor and value.device == device else move(value, device, non_blocking)
            for key, value in tree.items()
        }
        return moved if type(tree) is dict else _like(tree, moved)
    if isinstance(tree, PackedSequence):  # its batch_sizes stay on the CPU
        return tree.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
    if isinstance(tree, (list, tuple)):
        values = [
            value if type(value) is torch.Tensor and value.device == device else move(value, device, non_blocking)
            for value in tree
        ]
        if type(tree) is list:
            return values
        is_named = isinstance(tree, tuple) and hasattr(tree, "_fields")
        return type(tree)(*values) if is_named else type(tree)(values)
    if callable(getattr(tree, "to", None)):
        return tree.to(device, non_blocking=non_blocking) if _takes_non_blocking(tree.__class__) else tree.to(device)
    return map_tensors(lambda tensor: move(tensor, device, non_blocking), tree)


@functools.cache
def _takes_non_blocking(kind: type[Any]) -> bool:
    """Return whether a class's `to` takes `non_blocking`, which recbole's `Interaction` does not."""
    try:
        parameters = inspect.signature(kind.to).parameters
    except (AttributeError, TypeError, ValueError):  # an attribute of the object, or a function without a signature
        return True
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _like(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Return `mapped` as the type of `tree` if that can be created from a dict (transformers' BatchEncoding)."""
    try:
        return type(tree)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of a mapping; iteration over a TensorDict would yield rows instead."""
    return [*mapping.keys()]


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor in nested mappings, lists, tuples and deques, depth first."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple, deque)):
        for value in tree:
            yield from tensors(value)


def repeated_dimensions(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions whose elements share one memory location, as `expand` creates them."""
    if tensor.layout != torch.strided:
        return []
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dimension for dimension, (size, stride) in pairs if stride == 0 and size > 1]


def flatten_state(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state into a JSON tree and tensors; `unflatten_state` is the inverse.

    A state consists of dicts (OrderedDict and Counter too, with keys of any plain type), lists, tuples, sets,
    deques, None, bool, int, float (inf and nan too), str, bytes, paths, torch tensors, dtypes, devices and sizes, numpy
    arrays and scalars. A named tuple is restored as a tuple, a parameter as a tensor. Tensors are neither copied nor
    moved; numpy arrays are copied. The JSON tree keeps strides that are not row-major, since the memory order affects
    the last bits of sums and matrix products.

    Args:
        tree: The state.

    Returns:
        The tree for `json.dumps(..., allow_nan=False)`, and the tensors by their names in the tree.

    Raises:
        TypeError: If the tree holds a value of another type; the message names its place and type.
        ValueError: If the tree contains itself.
    """
    found: dict[str, torch.Tensor] = {}
    try:
        return _encode(tree, (), found), found
    except RecursionError:
        raise ValueError("the state nests too deeply to be saved; does it contain itself?") from None


def unflatten_state(json_tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Restore a state from the results of `flatten_state`.

    Args:
        json_tree: The tree that `flatten_state` returned, directly or through JSON.
        tensors: The tensors by name, with their own strides or row-major. The state shares their memory if their
            strides match.

    Raises:
        ValueError: If `flatten_state` did not make `json_tree`, or a tensor is missing or unused.
    """
    left = _Tensors(tensors)
    try:
        state = _decode(json_tree, left)
    except _NO_STATE as error:
        raise ValueError(f"this is no state that flatten_state() made: {type(error).__name__}: {error}") from error
    if left.named:
        raise ValueError(f"it does not name the tensor {next(iter(left.named))!r:.80}")
    return state


def plain_values(json_tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place ("counters.step") and value of each plain value in a tree of `flatten_state`.

    Tensors and arrays are skipped. A list, tuple, set or deque of plain values is one value, and so is an empty dict.

    Args:
        json_tree: The tree.
        place: Prefix of the places.

    Raises:
        ValueError: If `flatten_state` did not make `json_tree`.
    """
    try:
        items = _items(json_tree)
        value = _decode(json_tree, _Tensors({})) if items is None else None
    except _NO_STATE as error:
        raise ValueError(f"this is no state that flatten_state() made: {type(error).__name__}: {error}") from error
    if items is None:
        yield place, value
    for key, item in items or ():
        yield from plain_values(item, f"{place}.{key}" if place else str(key))


def tensor_names(json_tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the place, such as ("state", 0, "exp_avg"), and the name of each tensor in a tree of `flatten_state`.

    Args:
        json_tree: The tree.
        place: Prefix of the places.

    Raises:
        ValueError: If `flatten_state` did not make `json_tree`.
    """
    try:
        items = _items(json_tree)
        is_tensor = isinstance(json_tree, dict) and json_tree.get(_TAG) == "tensor"
        name: str = json_tree["value"] if is_tensor else ""
    except _NO_STATE as error:
        raise ValueError(f"this is no state that flatten_state() made: {type(error).__name__}: {error}") from error
    if is_tensor:
        yield place, name
    for key, item in items or ():
        yield from tensor_names(item, (*place, key))


def _items(json_tree: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and items of a container; an empty list for a tensor or array, None for a plain value."""
    is_tagged = isinstance(json_tree, dict) and _TAG in json_tree
    kind, content = (json_tree[_TAG], json_tree["value"]) if is_tagged else (None, json_tree)
    if kind in ("tensor", "ndarray"):
        return []
    if kind in _MAPPINGS:
        return [(_decode(key, _Tensors({})), item) for key, item in content] or None
    if isinstance(content, dict):
        return list(content.items()) or None
    is_nested = isinstance(content, list) and any(isinstance(item, (dict, list)) for item in content)
    return list(enumerate(content)) if is_nested else None


# Encoding of types that JSON lacks: {_TAG: kind, "value": ...}. A user's dict with the key _TAG is encoded as a list
# of pairs, to keep the two apart.
_SCALARS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),  # decimal digits are limited (sys.set_int_max_str_digits)
    "float": (float, repr, float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "path": (type(Path()), str, Path),
    "dtype": (torch.dtype, str, lambda text: _torch_dtype(text)),
    "device": (torch.device, str, torch.device),
}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
_KIND_OF = {
    **{scalar[0]: kind for kind, scalar in _SCALARS.items()},
    **{container: kind for kinds in (_SEQUENCES, _MAPPINGS) for kind, container in kinds.items()},
}
_NUMPY_KINDS = "biufcmMSU"  # plain bytes; objects ("O") and structured types ("V") are not
_NUMPY_DTYPE = r"[<>|][biufcSU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,9}[A-Za-z]+\])?"
_MOST_DIMENSIONS = 64
_TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NUMPY_IN_TORCH = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


def _encode(value: Any, path: tuple[Any, ...], found: dict[str, torch.Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() < 64):
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is list:
        return [_encode(item, (*path, index), found) for index, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", **_put(value.detach(), path, found)}
    if kind is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
        return _encode_array(value, path, found)
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {_TAG: "numpy", "value": value.tobytes().hex(), "dtype": value.dtype.str}
    return _encode_tagged(value, path, found)


def _encode_tagged(value: Any, path: tuple[Any, ...], found: dict[str, torch.Tensor]) -> Any:
    """Encode a value of a type that JSON lacks."""
    kind = tuple if isinstance(value, tuple) and hasattr(value, "_fields") else type(value)
    if kind not in _KIND_OF:
        raise TypeError(
            f"{_place(path)} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
            "keep tensors, numpy arrays, numbers, strings, None, and dicts, lists, tuples, sets or deques of them"
        )
    name = _KIND_OF[kind]
    if name in _SCALARS:
        return {_TAG: name, "value": _SCALARS[name][1](value)}
    if name in _MAPPINGS:
        return _encode_mapping(name, value, path, found)
    items = [_encode(item, (*path, index), found) for index, item in enumerate(value)]
    if kind is deque:
        return {_TAG: name, "value": items, "maxlen": value.maxlen}
    return {_TAG: name, "value": sorted(items, key=json.dumps) if kind in (set, frozenset) else items}


def _encode_mapping(kind: str, value: Mapping[Any, Any], path: tuple[Any, ...], found: dict[str, torch.Tensor]) -> Any:
    if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
        return {key: _encode(item, (*path, key), found) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        in_key: dict[str, torch.Tensor] = {}
        encoded = _encode(key, (*path, key), in_key)
        if in_key:
            raise TypeError(f"{_place(path)} has a key that is or holds a tensor, which a checkpoint cannot hold")
        pairs.append([encoded, _encode(item, (*path, key), found)])
    return {_TAG: kind, "value": pairs}


def _encode_array(array: np.ndarray[Any, Any], path: tuple[Any, ...], found: dict[str, torch.Tensor]) -> Any:
    """Encode an array; one of a dtype that torch lacks (dates, strings) is stored as bytes with its shape."""
    entry = {_TAG: "ndarray", "dtype": array.dtype.str}
    if array.dtype.isnative and array.dtype.name in _NUMPY_IN_TORCH:
        tensor = torch.from_numpy(np.array(array, order="K"))
    else:
        tensor = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else torch.empty(0)
        entry["shape"] = list(array.shape)
    return {**entry, **_put(tensor, path, found)}


def _put(tensor: torch.Tensor, path: tuple[Any, ...], found: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Add the tensor to `found` as "state.0.exp_avg" for its path; return that name, and unusual strides."""
    base = ".".join(re.sub(r"[^\w.-]", "_", str(part)) for part in path) or "tensor"
    name = base
    while name in found or name == "__metadata__":  # "__metadata__" is reserved in safetensors files
        name = f"{base}#{len(found)}" if name == base else f"{name}#"
    found[name] = tensor
    strides = strides_of_copy(tensor) if tensor.layout == torch.strided else None
    return {"value": name} if strides in (None, _row_major(tensor.shape)) else {"value": name, "strides": [*strides]}


def strides_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of a tensor: its own if it is dense in memory, as in `torch.empty_like`."""
    if tensor.stride() == (row_major := _row_major(tensor.shape)) or not tensor.numel():
        return row_major
    return torch.empty_like(tensor, device="meta").stride()


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides as torch computes them, with a size of 0 as 1."""
    return tuple(math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))


class _Tensors:
    """Tensors of a state by name, each of which is taken once.

    Attributes:
        named: The tensors not taken yet.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.named = dict(named)
        self._laid_out: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}  # keeps tied tensors tied

    def take(self, entry: Mapping[str, Any]) -> torch.Tensor:
        """Remove and return the tensor of an entry that `_put` made, with the entry's strides."""
        tensor = self.named.pop(entry["value"])
        if "strides" not in entry:
            return tensor
        strides = _checked_strides(entry["strides"], tensor.shape)
        if tensor.stride() == strides:
            return tensor
        key = (id(tensor), strides)
        if key not in self._laid_out:
            empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            self._laid_out[key] = empty.copy_(tensor)
        return self._laid_out[key]


def _checked_strides(strides: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides from a file, after a check that they are dense and without overlap."""
    if len(strides) != len(shape) or not all(type(stride) is int and 0 <= stride < 2**63 for stride in strides):
        raise ValueError(f"{strides!r:.50} are no strides of {len(shape)} dimensions")
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != filled:
            raise ValueError(f"the strides {strides} do not fit the shape {list(shape)}")
        filled *= size
    return tuple(strides)


def _place(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)


def _decode(value: Any, tensors: _Tensors) -> Any:
    """Decode `value`, and remove each tensor that it uses from `tensors`."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind, content = value[_TAG], value["value"]
    if kind in _SCALARS:
        return _SCALARS[kind][2](content)
    if kind in _SEQUENCES:
        items = [_decode(item, tensors) for item in content]
        return _limited(items, value["maxlen"]) if kind == "deque" else _SEQUENCES[kind](items)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(key, tensors): _decode(item, tensors) for key, item in content})
    if kind == "tensor":
        return tensors.take(value)
    if kind == "ndarray":
        return _decode_array(value, tensors.take(value))
    if kind == "numpy":
        return np.ndarray((), _numpy_dtype(value["dtype"]), buffer=bytes.fromhex(content))[()]
    raise ValueError(f"unknown kind {kind!r}")


def _limited(items: list[Any], limit: Any) -> deque[Any]:
    if limit is not None and (type(limit) is not int or not len(items) <= limit < 2**63):
        raise ValueError(f"{len(items)} items do not fit into a deque of maxlen {limit!r:.50}")
    return deque(items, limit)


def _decode_array(entry: Mapping[str, Any], tensor: torch.Tensor) -> np.ndarray[Any, Any] | torch.Tensor:
    dtype = _numpy_dtype(entry["dtype"])
    if tensor.is_meta:  # its values were not read
        return tensor
    array: np.ndarray[Any, Any] = tensor.cpu().numpy()
    if "shape" in entry:
        shape = _checked_shape(entry["shape"])
        if math.prod(shape) * dtype.itemsize != array.nbytes or not (array.nbytes or 0 in shape):
            raise ValueError(f"an array of shape {shape} and dtype {dtype} does not fit its {array.nbytes} bytes")
        array = np.ndarray(shape, dtype, buffer=np.ascontiguousarray(array))
    if array.dtype != dtype:
        raise ValueError(f"an array of dtype {dtype} came back as {array.dtype}")
    return array


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"{shape!r:.50} is no shape")
    return tuple(shape)


def _numpy_dtype(text: Any) -> np.dtype[Any]:
    """Return a numpy dtype of plain bytes; with an object dtype, bytes of a file would become pointers."""
    if not isinstance(text, str) or not re.fullmatch(_NUMPY_DTYPE, text):
        raise ValueError(f"dtype {text!r:.50} is not allowed")
    return np.dtype(text)


def _torch_dtype(text: str) -> torch.dtype:
    if text not in _TORCH_DTYPES:
        raise ValueError(f"{text!r:.50} is no torch dtype")
    return _TORCH_DTYPES[text]

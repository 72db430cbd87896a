"""Modes that see each call of torch's Python interface, and each operator that it dispatches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kit.fake_cuda.gpus import HOST, Gpus
from kit.fake_cuda.memory import Block, block_of, place_of

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.bincount, aten.repeat_interleave, aten.allclose,
}  # fmt: skip
"""Operators that return when the device has computed their result, which the host reads, or whose size it reads."""

_INDEXING = {aten.index, aten.index_put, aten.index_put_}
_FILLING = {aten.masked_fill, aten.masked_fill_}
_BATCH_NORMS = {aten.native_batch_norm, aten._native_batch_norm_legit, aten._batch_norm_with_update}
_MIXING = {  # calls that take tensors of several devices, as CUDA allows
    "copy_", "_foreach_copy_", "set_", "__set__", "__getitem__", "__setitem__", "index_put_", "type_as",
    "_has_compatible_shallow_copy_type", "is_same_size", "is_set_to", "grad", "register_hook",
}  # fmt: skip
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)


def waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether CUDA makes the host wait in an operator on a device."""
    packet = func.overloadpacket
    if packet in _INDEXING:  # a mask says how many there are, and indices on the host are copied
        return any(
            index is not None
            and (index.dtype in (torch.bool, torch.uint8) or (place_of(index) is None and index.ndim > 0))
            for index in args[1]
        )
    if packet in _FILLING:  # with a tensor's value
        return isinstance(args[2], torch.Tensor) and place_of(args[2]) is not None
    return packet in WAITING


class Calls(TorchFunctionMode):
    """Finds out on which device each call computes, and refuses tensors of different devices."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if self.gpus.is_off or is_fake or name in ("__get__", "_parse_to"):
            return func(*args, **kwargs)
        asked = self._asked(kwargs.get("device"))
        if asked == HOST and isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # from a mode that dispatches it, with the device that autograd knows
        if asked is not None:
            del kwargs["device"]
            if asked.type == "cuda" and func in _FROM_HOST:
                return torch.Tensor.to(func(*args, **kwargs), asked)
        is_pinned = kwargs.pop("pin_memory", False)
        tensors = [tensor for tensor in _tensors((args, kwargs.values())) if tensor.layout == torch.strided]
        places = [place_of(tensor) for tensor in tensors]
        place = next((place for place in places if place is not None), None)
        if place is not None and name not in _MIXING and asked is None:
            self._refuse_others(name, place, tensors, places)
        elif name == "__set__" and func.__self__.__name__ == "grad" and len({*places}) > 1:
            raise RuntimeError("assigned grad has data located on a different device")
        with self.gpus.within(place, asked):
            result = func(*args, **kwargs)
        if is_pinned:
            self.gpus.allocate(result, None)
        return result

    def _asked(self, device: Any) -> torch.device | None:
        """Return the device that a call names, if it is the host or a simulated one."""
        if device is None:
            return None
        place = self.gpus.device(device) if isinstance(device, int) else torch.device(device)
        return {"cuda": self.gpus.device(place), "cpu": HOST}.get(place.type)

    def _refuse_others(self, name: str, place: torch.device, tensors: list[torch.Tensor], places: list[Any]) -> None:
        for tensor, other in zip(tensors, places, strict=True):
            is_scalar = other is None and tensor.ndim == 0
            if other != place and not is_scalar and not tensor.is_meta:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{place} and {other or HOST}! (when calling {name})"
                )


class Operators(TorchDispatchMode):
    """Puts each operator on a stream, with what it reads and writes."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.gpus.is_off:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        gpus, scope, packet = self.gpus, self.gpus.scope, func.overloadpacket
        if packet is aten.copy_:
            gpus.copy(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            return func(*args, **kwargs)
        if packet is aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                gpus.copy(target, source, kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            return func(*args, **kwargs)
        asked = scope.asked
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # from Python code inside a call
            asked, kwargs["device"] = gpus.device(device), HOST
        operands = [(block_of(tensor), writes) for tensor, writes in _operands(func, args, kwargs)]
        blocks = [(block, writes) for block, writes in operands if block is not None]
        place = asked or next((block.device for block, _ in blocks if block.device is not None), None)
        if place is None and not operands:
            place = scope.ambient
        if place is None or place.type != "cuda":
            for block, writes in blocks:
                if writes is not None and block.device is None:
                    gpus.access_on_host(block, writes)
            return func(*args, **kwargs)
        if waits(func, args):
            gpus.wait_for_stream(str(packet), place)
        with self._generator(place, func, kwargs):
            result = func(*args, **kwargs)
        created = [
            gpus.allocate(each, place) for each in _tensors(result) if block_of(each) is None and has_memory(each)
        ]
        accesses: list[tuple[Block | None, bool]] = [(block, writes) for block, writes in blocks if writes is not None]
        gpus.launch(place, [*accesses, *((block, True) for block in created)])
        return result

    @contextlib.contextmanager
    def _generator(self, device: torch.device, func: Any, kwargs: dict[str, Any]) -> Iterator[None]:
        """Make the device's generator the default one of an operator that draws."""
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            yield
            return
        default, own = torch.default_generator, self.gpus.generators[device.index]
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


def has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool | None]]:
    """Yield each tensor that an operator takes, and whether it writes to it; None: it reads only the shape."""
    for position, (name, writes) in enumerate(_effects(func)):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in _tensors(value):
            yield tensor, writes


@functools.cache
def _effects(func: Any) -> list[tuple[str, bool | None]]:
    """Return the names of an operator's arguments, and what it does to them; see `_operands`."""
    name: str = func.overloadpacket.__name__
    is_factory = name.startswith("new_") or name.endswith("_like")
    effects: list[tuple[str, bool | None]] = []
    for argument in func._schema.arguments:
        effect: bool | None = argument.alias_info is not None and argument.alias_info.is_write
        is_statistic = func.overloadpacket in _BATCH_NORMS and argument.name in ("running_mean", "running_var")
        if is_factory or (argument.alias_info is not None and not effect):  # a view
            effect = None
        elif func.namespace == "c10d" or is_statistic:  # the schema does not say
            effect = True
        effects.append((argument.name, effect))
    return effects


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(tree.values())
    elif isinstance(tree, (list, tuple, type({}.values()))):
        for each in tree:
            yield from _tensors(each)

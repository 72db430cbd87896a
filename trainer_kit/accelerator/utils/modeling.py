"""Questions about a model's tensors, under accelerate's names."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from trainer_kit.checkpoint.format.loading import load_checkpoint_in_model
from trainer_kit.utils.tied_parameters import names_by_parameter, tie_again
from trainer_kit.utils.units import parse_size
from trainer_kit.utils.wrappers import without_wrappers

__all__ = [
    "check_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_max_memory",
    "get_non_persistent_buffers",
    "has_offloaded_params",
    "id_tensor_storage",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]

Dtype = str | torch.dtype


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model, or what `torch.compile` wraps, is a `PeftModel`."""
    peft = sys.modules.get("peft")  # imported already if the model is one
    return peft is not None and isinstance(without_wrappers(model), peft.PeftModel)


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size such as "5GB" in bytes.

    Raises:
        ValueError: If the text is no size.
    """
    return parse_size(size, "size")


def dtype_byte_size(dtype: torch.dtype) -> int:
    """Return the bytes that an element takes in memory; a bool takes 1."""
    return dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what tensors that share their memory have in common: device, address and bytes of the storage."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: torch.nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and then the buffers of a module, with their names.

    Args:
        module: The module.
        include_buffers: Whether to yield buffers.
        recurse: Whether to yield those of the modules inside too.
        remove_non_persistent: Whether to leave out buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def get_non_persistent_buffers(module: torch.nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are not in the state dict.

    Args:
        module: The module.
        recurse: Whether to look into the modules inside.
        fqns: Whether the names begin with those of the modules.
    """
    owners = module.named_modules() if recurse else [("", module)]
    return {
        f"{path}.{name}" if fqns and path else name
        for path, owner in owners
        for name in owner._non_persistent_buffers_set
    }


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    return [names for names in names_by_parameter(model).values() if len(names) > 1]


def retie_parameters(model: torch.nn.Module, tied_params: Iterable[list[str]]) -> None:
    """Tie parameters again; each group gets its first parameter that is not on the meta device.

    Args:
        model: The model, changed in place.
        tied_params: Names, as `find_tied_parameters` returns them.
    """
    tie_again(model, [sorted(names, key=lambda name: model.get_parameter(name).is_meta) for names in tied_params])


def compute_module_sizes(
    model: torch.nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of each tensor and each module, the whole model's under "".

    Args:
        model: The model.
        dtype: Dtype in which floating-point tensors are counted, if theirs is not smaller; None: their own.
        special_dtypes: Dtypes of single tensors, by name.
        buffers_only: Whether to count buffers alone.
    """
    given = None if dtype is None else _dtype(dtype)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        width = tensor.dtype.itemsize
        if special_dtypes is not None and name in special_dtypes:
            width = _dtype(special_dtypes[name]).itemsize
        elif given is not None and tensor.is_floating_point():
            width = min(width, given.itemsize)
        parts = name.split(".")
        for count in range(len(parts) + 1):
            sizes[".".join(parts[:count])] += tensor.numel() * width
    return sizes


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the free bytes of each GPU, by its number, and of the host, under "cpu".

    Args:
        max_memory: Sizes to return in bytes instead, such as `{0: "10GB"}`.
    """
    if max_memory is not None:
        return {device: parse_size(size, "max_memory") for device, size in max_memory.items()}
    free: dict[int | str, int] = {each: torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())}
    return {**free, "cpu": psutil.virtual_memory().available}


def check_device_map(model: torch.nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map names each parameter and buffer, or a module around it.

    Raises:
        ValueError: If it does not.
    """
    names = [
        name
        for name in model.state_dict()
        if not any(key in ("", name) or name.startswith(f"{key}.") for key in device_map)
    ]
    if names:
        raise ValueError(f"device_map names no device for {', '.join(names)}; name one, or a module around it")


def set_module_tensor_to_device(
    module: torch.nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: Dtype | None = None,
    fp16_statistics: Any = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer of a module to a device, and give it a value.

    Args:
        module: The module, changed in place.
        tensor_name: Name of the tensor, with those of the modules around it.
        device: The device.
        value: The new value; None: its own, which must not be on the meta device.
        dtype: Dtype of the value; None: that of the tensor if it is floating-point, else the value's own.
        fp16_statistics: Must be None: 8-bit weights of bitsandbytes are not taken apart.
        tied_params_map: Without effect: `retie_parameters` ties parameters again.
        non_blocking: Whether the copy need not be finished on return.
        clear_cache: Without effect: no cache is filled.

    Raises:
        ValueError: If there is no such tensor, no value, or the value has another shape.
    """
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    is_buffer = name in owner._buffers
    old = owner._buffers[name] if is_buffer else owner._parameters.get(name)
    if old is None or fp16_statistics is not None:
        raise ValueError(f"{tensor_name} is no tensor of {type(module).__name__} that can be set; see its state_dict()")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name} is on the meta device; give value=")
    if value is not None and value.shape != old.shape:
        raise ValueError(
            f"value has the shape {tuple(value.shape)} and {tensor_name} {tuple(old.shape)}; give its shape"
        )
    chosen = old.dtype if dtype is None and old.is_floating_point() else None if dtype is None else _dtype(dtype)
    with torch.no_grad():
        new = (old if value is None else value).detach().to(device, chosen, non_blocking=non_blocking)
    if is_buffer:
        owner._buffers[name] = new
    else:
        is_trained = old.requires_grad and (new.is_floating_point() or new.is_complex())
        owner._parameters[name] = torch.nn.Parameter(new, requires_grad=is_trained)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of safetensors, or of a pickle that holds tensors alone.

    Args:
        checkpoint_file: Path of the file.
        device_map: One device, as `{"": device}`; None: the CPU.

    Raises:
        ValueError: If `device_map` names several devices.
    """
    devices = {str(device) for device in (device_map or {"": "cpu"}).values()}
    if len(devices) > 1:
        raise ValueError("device_map names several devices; give one")
    (device,) = devices
    if Path(checkpoint_file).suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(checkpoint_file, device=int(device) if device.isdecimal() else device)
    place = f"{_accelerator()}:{device}" if device.isdecimal() else device
    found: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location=place, weights_only=True)
    return found


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """Return False: no parameters are offloaded here."""
    return False


def _dtype(dtype: Dtype) -> torch.dtype:
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type

"""Models without memory, and their loading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_kit.checkpoint import load_checkpoint_in_model

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"]


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Enter a context in which new modules' parameters are on the meta device, without memory.

    Args:
        include_buffers: Whether buffers are on the meta device too; None: no.
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Enter a context in which new modules' parameters are on a device.

    Args:
        device: The device.
        include_buffers: Whether buffers and all other tensors are created there too; None: no.
    """
    if include_buffers:
        with device:
            yield
        return
    register = torch.nn.Module.register_parameter

    def register_there(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device != device:
            moved = torch.nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            parameter = moved
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_there  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    dtype: str | torch.dtype | None = None,
) -> torch.nn.Module:
    """Load weights into a model, which may be on the meta device, and return it on its device in evaluation mode.

    Args:
        model: The model.
        checkpoint: See `load_checkpoint_in_model`.
        device_map: One device, as text or as `{"": device}`; "auto" and the like: torch's accelerator, else the CPU;
            None: the CPU. A model that is divided over devices is not available.
        strict: Whether a name that only the model or only the files have is an error.
        dtype: Dtype of the floating-point weights; None: as in the model.

    Raises:
        ValueError: If `device_map` names several devices or the disk, or a tensor has no value after loading.
    """
    if isinstance(device_map, Mapping):
        if len({str(each) for each in device_map.values()}) > 1:
            raise ValueError("device_map names several devices; give one, or shard the model with FSDP")
        device_map = next(iter(device_map.values()), None)
    if device_map == "disk":
        raise ValueError("device_map='disk' is not available; give a device, or shard the model with FSDP")
    device: Any = device_map
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    made = _give_memory(model)
    if dtype is not None:
        model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    load_checkpoint_in_model(model, checkpoint, strict=strict)
    values = model.state_dict()
    for name in made:
        if values[name].is_floating_point() and values[name].numel() and values[name].isnan().all():
            raise ValueError(f"{name} is on the meta device and not in {os.fspath(checkpoint)!r}; make it on a device")
    return model.to("cpu" if device is None else device).eval()


def _give_memory(model: torch.nn.Module) -> list[str]:
    """Replace tensors on the meta device by NaN or 0 in memory; tied ones stay tied. Return their names."""
    state = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in state:
            raise ValueError(
                f"the buffer {name} is on the meta device, but no checkpoint holds it; make the model by "
                "init_empty_weights(include_buffers=False)"
            )
    made: dict[int, torch.Tensor] = {}
    names = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    for name in names:
        old = state[name]
        if id(old) not in made:
            value = torch.full_like(old, torch.nan if old.is_floating_point() else 0, device="cpu")
            is_parameter = isinstance(old, torch.nn.Parameter)
            made[id(old)] = torch.nn.Parameter(value, old.requires_grad) if is_parameter else value
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, made[id(old)])
    return names

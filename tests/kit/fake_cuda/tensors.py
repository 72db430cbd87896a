"""What a tensor answers in the simulation: its device, and its methods that move or read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.fake_cuda.gpus import HOST, Gpus
from kit.fake_cuda.memory import Block, block_of, place_of
from kit.fake_cuda.modes import has_memory


def replace_tensor_methods(gpus: Gpus, patches: pytest.MonkeyPatch) -> None:
    """Replace the methods of `torch.Tensor`, those of storages that copy, and `torch.autograd.backward`."""
    original = {name: getattr(torch.Tensor, name) for name in ("to", "numpy", "tolist")}
    real_device = torch._C.TensorBase.device
    real_backward = torch.autograd.backward

    def replace(function: Any) -> None:
        patches.setattr(torch.Tensor, function.__name__, function)

    def device(self: torch.Tensor) -> torch.device:
        place = place_of(self)
        if place is not None:
            return place
        with torch._C.DisableTorchFunction():
            return real_device.__get__(self)  # type: ignore[attr-defined, no-any-return]

    patches.setattr(torch.Tensor, "device", property(device))
    patches.setattr(torch.Tensor, "is_cuda", property(lambda self: place_of(self) is not None))
    patches.setattr(torch.Tensor, "is_cpu", property(lambda self: device(self).type == "cpu"))

    @replace
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if gpus.is_off or not has_memory(self):
            return original["to"](self, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (gpus.device(args[0]), *args[1:])
        is_copy = kwargs.pop("copy", False)
        target, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if target is not None and target.type not in ("cuda", "cpu"):
            return original["to"](self, *args, **kwargs)
        options = {"memory_format": memory_format} if memory_format is not None else {}
        place = place_of(self)
        goal = place if target is None else None if target.type == "cpu" else gpus.device(target)
        is_moved = goal != place
        tensor = original["to"](self, dtype or self.dtype, copy=is_copy and not is_moved, **options)
        return gpus.moved(tensor, goal, non_blocking) if is_moved else tensor

    @replace
    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        return self.to(gpus.device(device), non_blocking=non_blocking, **options)

    @replace
    def cpu(self: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.to(HOST, **options)

    @replace
    def get_device(self: torch.Tensor) -> int:
        place = place_of(self)
        return -1 if place is None else place.index

    @replace
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if place_of(self) is None:
            read_on_host(self)
            return original["numpy"](self, force=force)
        if force:
            return original["numpy"](self.detach().cpu(), force=True)
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    @replace
    def tolist(self: torch.Tensor) -> Any:
        tensor = self if place_of(self) is None else self.cpu()
        read_on_host(tensor)
        return original["tolist"](tensor)

    @replace
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if place_of(self) is not None:
            raise RuntimeError(f"cannot pin '{self.device}' tensor; only dense CPU tensors can be pinned")
        if self.is_pinned():
            return self
        with gpus.within(None, is_off=True):
            pinned = self.clone()
        gpus.allocate(pinned, None)
        return pinned

    @replace
    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        block = block_of(self)
        return block is not None and block.device is None

    @replace
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        block = block_of(self)
        assert block is not None
        block.recorded.add(stream.id)

    @replace
    def backward(
        self: torch.Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        first = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        with gpus.within(place_of(first), is_off=gpus.scope.is_off):
            real_backward(tensors, *args, **kwargs)

    patches.setattr(torch.autograd, "backward", run_backward)

    def read_on_host(tensor: torch.Tensor) -> None:
        block = block_of(tensor)
        if block is not None and not gpus.is_off:
            gpus.access_on_host(block, writes=False)

    for name in ("clone", "__deepcopy__"):
        patches.setattr(torch.UntypedStorage, name, _on_same_device(gpus, getattr(torch.UntypedStorage, name)))


def _on_same_device(gpus: Gpus, copy: Any) -> Any:
    """Return a storage's method that copies it, with the copy on the storage's device."""

    def copied(self: torch.UntypedStorage, *args: Any) -> torch.UntypedStorage:
        block: Block | None = getattr(self, "fake_block", None)
        with gpus.within(None, is_off=True):
            storage: torch.UntypedStorage = copy(self, *args)
        if block is not None and block.device is not None and not hasattr(storage, "fake_block") and not gpus.is_off:
            with gpus.within(None, is_off=True):
                tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
            gpus.launch(block.device, [(block, False), (gpus.allocate(tensor, block.device), True)])
        return storage

    return copied

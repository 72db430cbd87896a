"""How tensors are divided over a mesh of XLA devices, and put together again."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch

BATCH_AXES = ("data", "fsdp")
"""Axes that a mesh may have; batches are divided over all of them."""

_LEAST_RATE = 1e-30
"""In place of a learning rate of 0."""


def check_axes(mesh: Any, fsdp: bool) -> None:
    """Refuses a mesh that batches, or parameters, cannot be divided over.

    Raises:
        TypeError: If it is none.
        ValueError: If it has other axes, naming them.
    """
    if mesh is None:
        return
    axes = tuple(mesh) if isinstance(mesh, Mapping) else getattr(mesh, "axis_names", None)
    if axes is None:
        raise TypeError(f"mesh={mesh!r} is a {type(mesh).__name__}; give the devices by axis, such as {{'data': 4}}")
    if not axes or not set(axes) <= set(BATCH_AXES) or (fsdp and "fsdp" not in axes):
        needed = "must have the axis 'fsdp', and may have 'data'" if fsdp else "may be 'data' and 'fsdp'"
        raise ValueError(f"mesh has the axes {', '.join(map(repr, axes)) or 'none'}; they {needed}")


class Division:
    """Divides tensors over the axes of a mesh.

    Args:
        mesh: A `torch_xla.distributed.spmd.Mesh`, or sizes by axis; None: all devices on one axis.
        count: Devices.
        axis: The name of that one axis.

    Attributes:
        mesh: The mesh.
        parts: How many a batch is divided into.

    Raises:
        ValueError: If the mesh has another number of devices.
    """

    def __init__(self, mesh: Any, count: int, axis: str) -> None:
        self._spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        if mesh is None:
            mesh = {axis: count}
        if isinstance(mesh, Mapping):
            if math.prod(mesh.values()) != count:
                raise ValueError(f"mesh={dict(mesh)} is for {math.prod(mesh.values())} devices, but there are {count}")
            mesh = self._spmd.Mesh(list(range(count)), tuple(mesh.values()), tuple(mesh))
        self.mesh = mesh
        self._axes = tuple(mesh.axis_names)
        self.parts = math.prod(mesh.shape().values())
        self._specs: dict[int, Any] = {}

    def along_samples(self, tensor: torch.Tensor) -> Any:
        """The `ShardingSpec` of a batch's tensor; None for one that stays whole since its samples do not divide."""
        if tensor.ndim == 0 or tensor.shape[0] % self.parts:
            return None
        if tensor.ndim not in self._specs:
            self._specs[tensor.ndim] = self._spmd.ShardingSpec(self.mesh, self._samples(tensor.ndim))
        return self._specs[tensor.ndim]

    def _samples(self, dimensions: int) -> tuple[Any, ...]:
        return (self._axes if len(self._axes) > 1 else self._axes[0], *[None] * (dimensions - 1))

    def mark_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tells the compiler that an output is divided along its samples."""
        if self.along_samples(tensor) is not None:
            self._spmd.mark_sharding(tensor, self.mesh, self._samples(tensor.ndim))
        return tensor

    def mark_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lets the graph itself put an output together; reading a divided one compiles a computation each time."""
        self._spmd.mark_sharding(tensor, self.mesh, (None,) * tensor.ndim)
        return tensor

    def mark_longest(self, tensor: torch.Tensor) -> None:
        """Divides an optimizer's tensor along its longest dimension, as FSDPv2 divides the parameter."""
        longest = tensor.shape.index(max(tensor.shape))
        spec = tuple("fsdp" if dimension == longest else None for dimension in range(tensor.ndim))
        self._spmd.mark_sharding(tensor, self.mesh, spec)

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this host's devices on the host, put together from their parts."""
        # `.cpu()` of a divided tensor compiles a computation each time.
        divided = self._spmd.wrap_if_sharded(tensor)
        if not hasattr(divided, "local_shards"):
            return tensor.cpu()
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in divided.local_shards:
            place = () if shard.indices is Ellipsis else tuple(shard.indices)
            whole[place] = shard.data[tuple(slice(0, part.stop - part.start) for part in place)]
        return whole

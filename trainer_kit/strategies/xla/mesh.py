"""Sharding of tensors over a mesh of XLA devices."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch

BATCH_AXES = ("data", "fsdp")
"""Axes that a mesh may have; batches are sharded over all of them."""

_LEAST_RATE = 1e-30
"""Value used in place of a learning rate of 0."""


def check_axes(mesh: Any, fsdp: bool) -> None:
    """Check the axes of a mesh.

    Args:
        mesh: A mesh, or sizes by axis; None: all devices on one axis.
        fsdp: Whether parameters are sharded too, which needs the axis "fsdp".

    Raises:
        TypeError: If `mesh` is neither a mesh nor a mapping.
        ValueError: If its axes are not allowed, or "fsdp" is missing; the message names them.
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
    """Sharding of tensors over the axes of a mesh.

    Args:
        mesh: A `torch_xla.distributed.spmd.Mesh`, or sizes by axis; None: all devices on one axis.
        count: Number of devices.
        axis: Name of the axis if `mesh` is None.

    Attributes:
        mesh: The mesh.
        parts: Number of shards of a batch.

    Raises:
        ValueError: If the sizes by axis do not multiply to `count`.
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
        """Return the `ShardingSpec` of a batch's tensor; None if its number of samples is not divisible by `parts`."""
        if tensor.ndim == 0 or tensor.shape[0] % self.parts:
            return None
        if tensor.ndim not in self._specs:
            self._specs[tensor.ndim] = self._spmd.ShardingSpec(self.mesh, self._samples(tensor.ndim))
        return self._specs[tensor.ndim]

    def _samples(self, dimensions: int) -> tuple[Any, ...]:
        return (self._axes if len(self._axes) > 1 else self._axes[0], *[None] * (dimensions - 1))

    def mark_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark an output as sharded along its samples, for the compiler."""
        if self.along_samples(tensor) is not None:
            self._spmd.mark_sharding(tensor, self.mesh, self._samples(tensor.ndim))
        return tensor

    def mark_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark an output as replicated, so that reading it compiles no further computation."""
        self._spmd.mark_sharding(tensor, self.mesh, (None,) * tensor.ndim)
        return tensor

    def mark_longest(self, tensor: torch.Tensor) -> None:
        """Shard an optimizer's tensor along its longest dimension, as FSDPv2 shards the parameter."""
        longest = tensor.shape.index(max(tensor.shape))
        spec = tuple("fsdp" if dimension == longest else None for dimension in range(tensor.ndim))
        self._spmd.mark_sharding(tensor, self.mesh, spec)

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a full copy on the host of a tensor that is sharded over this host's devices."""
        # `.cpu()` of a sharded tensor compiles a computation each time.
        divided = self._spmd.wrap_if_sharded(tensor)
        if not hasattr(divided, "local_shards"):
            return tensor.cpu()
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in divided.local_shards:
            place = () if shard.indices is Ellipsis else tuple(shard.indices)
            whole[place] = shard.data[tuple(slice(0, part.stop - part.start) for part in place)]
        return whole

"""Copies of many tensors with few kernel launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, on one device.

    torch copies a list in one launch only if its tensors have one dtype and each pair has the same strides. Otherwise
    it launches a kernel for each pair, so the pairs are grouped here.
    """
    groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = target.dtype, source.dtype, target.stride() == source.stride()
        group = groups.setdefault(kind, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)

"""`Launches`: the number of kernels that operators would launch on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_WITHOUT_KERNEL = (aten.empty, aten.empty_like, aten.empty_strided, aten.detach)


class Launches(TorchDispatchMode):
    """Counts the kernels of the operators in its context, without views and allocations.

    `_foreach_copy_` is one kernel if its targets have one dtype, its sources too, and each pair the same strides; else
    it is one kernel a pair (torch's aten/src/ATen/native/cuda/ForeachBinaryOpList.cu). Other operators count once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if func.overloadpacket is aten._foreach_copy_:
            self.count += _kernels(*args[:2])
        elif not is_view and func.overloadpacket not in _WITHOUT_KERNEL:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _kernels(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> int:
    pairs = [*zip(targets, sources, strict=True)]
    dtypes = {(target.dtype, source.dtype) for target, source in pairs}
    is_fast = len(dtypes) == 1 and all(target.stride() == source.stride() for target, source in pairs)
    return 1 if is_fast else len(pairs)

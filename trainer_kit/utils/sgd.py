"""`SGD`: torch's fused SGD, whose momentum is defined from the start, and what it does not train."""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

# github.com/pytorch/pytorch/issues/191763
_SKIPS_HALF_WEIGHTS = TorchVersion(torch.__version__) < "2.14"


def is_skipped(parameter: torch.Tensor) -> bool:
    """Return whether torch's fused SGD leaves most of a parameter as it is: on the CPU, those of 16 bits."""
    return _SKIPS_HALF_WEIGHTS and parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16)


class SGD(torch.optim.SGD):
    """Fused SGD, with momentum but without dampening.

    torch's own leaves the momentum without values if gradients overflow in the first step, and fails if a parameter
    gets its first gradient in a later step than another. A group with a sparse gradient is no longer fused.
    """

    def _init_group(
        self, group: dict[str, Any], params: list[Any], grads: list[Any], momentum_buffer_list: list[Any]
    ) -> bool:
        has_sparse_grad: bool = super()._init_group(  # type: ignore[no-untyped-call]
            group, params, grads, momentum_buffer_list
        )
        if has_sparse_grad:
            group["fused"] = False
        if group["fused"] and group["momentum"]:
            momentum_buffer_list[:] = [
                torch.zeros_like(grad) if buffer is None else buffer
                for grad, buffer in zip(grads, momentum_buffer_list, strict=True)
            ]
        return has_sparse_grad

"""Differences between a CUDA GPU and a CPU, modelled without a GPU: fake tensors are on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from trainer_kit.memory.anatomy import Component
from trainer_kit.utils.units import format_size

GRANULARITY = 512
"""Block size of torch's CUDA allocator in bytes (kMinBlockSize in c10/cuda/CUDACachingAllocator)."""

CONTEXT = 512 * 2**20
"""Bytes of a CUDA context with the kernels that a training loads; between 300 and 600 MiB since CUDA loads kernels when
they are first called (CUDA C++ Programming Guide, "Lazy Loading"), and far more before that."""

_HOPPER = 9
_DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Position of `dropout_p` among the arguments of functions that compute attention."""

WORKSPACE = {False: 4096 * 1024 * 2 + 16 * 1024 * 8, True: 32 * 2**20}
"""Bytes of the cuBLAS workspace, before Hopper and since (cuBLAS documentation, "cublasSetWorkspace"), per thread: the
forward pass has one and the backward pass another (aten/src/ATen/cuda/CublasHandlePool)."""

# "CUDA Ops that can autocast to float32" in the documentation of torch.amp, by the names of functions and methods.
_IN_FLOAT32 = {
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist",
    "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv",
    "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod",
    "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus",
    "sum", "tan", "triplet_margin_loss",
}  # fmt: skip


def runtime() -> Component:
    """Return the memory of CUDA and cuBLAS on the present GPU, or on a Hopper or newer one if there is none."""
    has_large = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= _HOPPER
    return Component(
        "runtime",
        CONTEXT + 2 * WORKSPACE[has_large],
        "assumed: a CUDA context of 512 MiB (CUDA C++ Programming Guide, Lazy Loading) and, for the forward and for "
        "the backward pass, the workspace that the documentation of cublasSetWorkspace recommends, "
        f"{format_size(WORKSPACE[has_large])}",
    )


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Select the foreach implementation, as the optimizer does on a GPU, unless the user chose another.

    Args:
        optimizer: Optimizer, changed in place.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


class AsOnCuda(TorchFunctionMode):
    """Mode in which functions keep the tensors that their GPU implementations keep.

    - Attention with dropout keeps no scores; the CPU's fused kernel without dropout keeps the same tensors.
    - Dropout keeps its mask as bytes.
    - Under autocast more functions compute in float32.

    Workspaces of cuDNN are not modelled: cuDNN chooses them by benchmarking.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.backward:
            return self._backward(args[0])
        if (place := _DROPOUT.get(name)) is not None:
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif name == "dropout":
            return _dropout(func, *args, **kwargs)
        elif name in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_in_float32, (args, kwargs))
        return func(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass with this mode enabled, since checkpointing recomputes functions in it.

        torch disables the mode inside the functions that it intercepts, which include torch's own entry to the engine.
        """
        one = torch.ones_like(loss)
        engine: Any = torch.autograd.Variable._execution_engine
        with self:
            engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _dropout(func: Any, input: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
    is_training = args[0] if args else kwargs.get("training", kwargs.get("train", True))
    is_in_place = args[1] if len(args) > 1 else kwargs.get("inplace", False)
    if is_training and not is_in_place and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, *args, **kwargs)


def _in_float32(leaf: Any) -> Any:
    is_short = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_short else leaf

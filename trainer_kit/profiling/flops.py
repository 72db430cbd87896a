"""Floating-point operations of a step, counted while it runs: forward, backward, and recomputation.

A multiplication and its addition are two operations. Only matrix products count: linear layers, convolutions,
attention, recurrent layers. Everything else (norms, activations, softmax, the optimizer) is excluded, as in the
formulas of the PaLM paper (Chowdhery et al. 2022, appendix B), which define model FLOPs utilization. As there,
attention counts in full, even where a mask excludes half of it.

A backward pass takes twice the operations of its forward pass: one product for the gradient of the input and one for
that of the weight, where they are needed. Recomputation in the backward pass counts in the hardware's FLOPs, not in
the model's: activation checkpointing (`torch.utils.checkpoint`), and the scores that fused attention kernels do not
keep (Dao et al. 2022, FlashAttention, section 3.1).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from trainer_kit.utils.late_compiler import call_as_is

Formula = Callable[..., tuple[int, int]]

_CHECKPOINT = torch.utils.checkpoint.__file__
_NO_BACKWARD = -1


class Flops(NamedTuple):
    """Number of floating-point operations.

    Attributes:
        forward: Operations of the forward pass.
        backward: Operations of the backward pass, without recomputation.
        recomputed: Operations of recomputation in the backward pass: checkpointed layers, the scores of fused
            attention.
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    @property
    def model(self) -> int:
        """Operations that the model needs, independent of the implementation."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Operations that the device computes."""
        return self.model + self.recomputed

    def plus(self, other: Flops) -> Flops:
        """Return the sum with `other`."""
        return Flops(*(own + others for own, others in zip(self, other, strict=True)))

    def times(self, factor: float) -> Flops:
        """Return the multiple by `factor`, rounded."""
        return Flops(*(round(own * factor) for own in self))

    def minus(self, other: Flops) -> Flops:
        """Return the difference to `other`."""
        return Flops(*(own - others for own, others in zip(self, other, strict=True)))


class FlopCounter(TorchDispatchMode):
    """Mode that counts the operators in its context by their shapes, without a change of values or a synchronization.

    It uses the formulas of torch's `FlopCounterMode`, and those below, which torch lacks. It is no subclass of it:
    `FlopCounterMode` does not separate recomputation, runs compiled functions uncompiled, and its hooks on every tensor
    raise errors for second-order gradients. To count fake tensors, enter it after their mode.

    In functions of torch.compile it counts the operators that they call, by default the matrix products; their
    recomputation counts as backward. It cannot see kernels that are no operators of torch: those that the compiler
    generates (flex_attention, max-autotune), and those of packages such as flash-attn.

    Args:
        when: Returns whether to count an operator; None counts all.

    Attributes:
        uncounted: Operators whose formula raised an error, with the error.
    """

    supports_higher_order_operators = True

    def __init__(self, when: Callable[[], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._when = when
        self._forward = self._backward = self._recomputed = 0
        self.uncounted: dict[str, str] = {}

    @property
    def flops(self) -> Flops:
        """Operations counted so far."""
        return Flops(self._forward, self._backward, self._recomputed)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that compiled functions run compiled: under user modes torch calls the original."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # nested and distributed tensors: the calls for their parts arrive here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula and (self._when is None or self._when()):
            try:
                count = formula(*args, **kwargs, out_val=result)
            except Exception as error:  # an operator's arguments may differ in this torch version
                self.uncounted[str(func)] = f"{type(error).__name__}: {error}"
            else:
                self._add(*(count if isinstance(count, tuple) else (count, 0)))
        return result

    def _add(self, needed: int, again: int) -> None:
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            self._forward += needed + again
        elif torch.is_grad_enabled() and _is_checkpointed():
            self._recomputed += needed + again
        else:
            self._backward += needed
            self._recomputed += again


def count_on_fakes(model: torch.nn.Module, batch: Any, context: contextlib.AbstractContextManager[Any]) -> Flops:
    """Count a forward and a backward pass without computing them, for compiled models.

    Steps of a compiled model cannot be counted: torch recompiles a step under a counter, and does not show the
    operations of its kernels. The model's own code is therefore called uncompiled, with fake tensors as weights and
    batch. A sharded or quantized weight is replaced by a plain one of the whole shape.

    Args:
        model: Model; it stays unchanged. It is called with the batch's columns by name, or with its elements.
        batch: Batch on any device.
        context: Context of the forward pass (autocast).

    Raises:
        RuntimeError: If the model cannot be called in this way, or branches on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fakes = {name: _fake(mode, weight) for name, weight in weights.items()}
    named = {**batch} if isinstance(batch, Mapping) else {}
    elements = () if named else tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    inputs = tree_map_only(torch.Tensor, mode.from_tensor, (elements, named))
    counter = FlopCounter()
    try:
        with torch.compiler.set_stance("force_eager"), mode, counter:
            with context:
                outputs = torch.func.functional_call(model, fakes, *inputs)
            torch.autograd.backward([loss.sum() for loss in _losses(outputs)])
    except Exception as error:  # the user's code may raise any error
        raise RuntimeError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return counter.flops


def _fake(mode: FakeTensorMode, weight: torch.Tensor) -> torch.Tensor:
    if not is_traceable_wrapper_subclass(weight):
        return mode.from_tensor(weight)
    with mode:
        plain = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return plain.requires_grad_(weight.requires_grad)


def _losses(outputs: Any) -> list[torch.Tensor]:
    """Return the loss if the model returns one, else all outputs with gradients."""
    is_mapping = isinstance(outputs, Mapping)
    loss = outputs.get("loss") if is_mapping else None
    found = [loss] if isinstance(loss, torch.Tensor) else tree_leaves({**outputs} if is_mapping else outputs)
    return [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]


def _is_checkpointed() -> bool:
    """Return whether the caller is a recomputed function of `torch.utils.checkpoint`.

    Gradients are enabled in a backward pass for second-order gradients too, so only the stack distinguishes them.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Return the FLOPs of the scores and of their product with the values.

    The query has the shape [batch, heads, length, size], key and value alike. Grouped heads share keys and values.
    """
    scores = 2 * query.numel() * key.shape[-2]
    return scores + 2 * math.prod(query.shape[:-1]) * value.shape[-2] * value.shape[-1], 0


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Return two products for each one of the forward pass, and the recomputed scores."""
    return 2 * _attention(query, key, value)[0], 2 * query.numel() * key.shape[-2]


def _flex_attention_backward(*args: Any, **__: Any) -> tuple[int, int]:
    return _attention_backward(None, *args)


def _convolution_backward(
    gradient: Any, image: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: Any, output_mask: Any, **_: Any,
) -> tuple[int, int]:  # fmt: skip
    """Return the forward FLOPs once per required gradient; torch's own formula ignores groups."""
    positions = math.prod((image if transposed else gradient).shape[2:])
    return 2 * image.shape[0] * positions * weight.numel() * (output_mask[0] + output_mask[1]), 0


def _recurrent(inputs: Any, weights: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Return one product with each weight matrix per row; inputs [..., size]."""
    rows = inputs.numel() // inputs.shape[-1]
    return 2 * rows * sum(weight.numel() for weight in weights if weight.ndim == 2), 0


def _recurrent_layer(inputs: Any, of_inputs: Any, of_state: Any, *_: Any, **__: Any) -> tuple[int, int]:
    return _recurrent(inputs, (of_inputs, of_state))


def _twice(formula: Formula) -> Formula:
    def backward(*args: Any, **kwargs: Any) -> tuple[int, int]:
        return 2 * formula(*args, **kwargs)[0], 0

    return backward


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Return the FLOPs of products of groups (experts): split by rows, columns or summed dimension; or in 3D."""
    rows = left.shape[-2] * left.shape[-1] if right.ndim == 2 else left.numel()
    return 2 * rows * right.shape[-1], 0


def _product(left: Any, *_: Any, out_val: Any, **__: Any) -> tuple[int, int]:
    return 2 * out_val.numel() * left.shape[-1], 0


def _convolution(image: Any, weight: Any, *_: Any, out_val: Any, **__: Any) -> tuple[int, int]:
    return 2 * out_val.numel() * math.prod(weight.shape[1:]), 0


def _found(formulas: dict[str, Formula]) -> dict[Any, Formula]:
    """Return the formulas of the operators that this torch version has."""
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)}


_FORMULAS: dict[Any, Formula] = {
    flex_attention: _attention,
    flex_attention_backward: _flex_attention_backward,
} | _found(
    {
        **{
            f"_scaled_dot_product_{kernel}{suffix}": formula
            for kernel in (
                "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                "fused_attention_overrideable",
            )
            for suffix, formula in (("", _attention), ("_backward", _attention_backward))
        },
        "_scaled_dot_product_attention_math_for_mps": _attention,
        "convolution_backward": _convolution_backward,
        "_cudnn_rnn": _recurrent,
        "_cudnn_rnn_backward": _twice(_recurrent),
        "miopen_rnn": _recurrent,
        "miopen_rnn_backward": _twice(_recurrent),
        "mkldnn_rnn_layer": _recurrent_layer,
        "mkldnn_rnn_layer_backward": _twice(_recurrent_layer),
        "_grouped_mm": _grouped_product,
        "_scaled_grouped_mm": _grouped_product,
        "_scaled_mm": _product,
        # Composite operators arrive undivided in inference mode and for values of nested tensors.
        "linear": _product,
        "matmul": _product,
        "conv1d": _convolution,
        "conv2d": _convolution,
        "conv3d": _convolution,
        "scaled_dot_product_attention": _attention,
    }
)  # fmt: skip


def _let_through(operator: Any) -> None:
    """Register a higher-order operator for the counter; torch 2.6 refuses modes without registration."""

    def counted(counter: FlopCounter, *args: Any, **kwargs: Any) -> Any:
        return counter.__torch_dispatch__(operator, (), args, kwargs)

    operator.py_impl(FlopCounter)(counted)


_let_through(flex_attention)
_let_through(flex_attention_backward)
call_as_is(FlopCounter.__torch_dispatch__)

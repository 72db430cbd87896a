"""Floating-point operations of a step, counted while it runs: forward, backward, and what is computed again.

A multiplication and its addition are two operations. Only products of matrices count: linear layers, convolutions,
attention, recurrent layers. All else (norms, activations, softmax, the optimizer) is left out, as in the formulas of
the PaLM paper (Chowdhery et al. 2022, appendix B), by which model FLOPs utilization is defined. Attention counts in
full, whether a mask leaves out a half of it or not, as there.

A backward pass takes twice the operations of its forward pass: one product for the gradient of the input, one for that
of the weight, where they are needed. What a pass computes again that the forward pass had computed already is no part
of the model's FLOPs, but is of the hardware's: activation checkpointing (`torch.utils.checkpoint`), and the scores
that the fused kernels of attention do not keep (Dao et al. 2022, FlashAttention, section 3.1).
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
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., tuple[int, int]]

_CHECKPOINT = torch.utils.checkpoint.__file__
_NO_BACKWARD = -1


class Flops(NamedTuple):
    """Floating-point operations.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass, without what it computes again.
        recomputed: What the backward pass computes again: checkpointed layers, the scores of fused attention.
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    @property
    def model(self) -> int:
        """What the model needs, however it is computed."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What the device computes."""
        return self.model + self.recomputed

    def plus(self, other: Flops) -> Flops:
        """These and `other`."""
        return Flops(*(own + others for own, others in zip(self, other, strict=True)))

    def times(self, factor: float) -> Flops:
        """So many times as many, rounded."""
        return Flops(*(round(own * factor) for own in self))

    def minus(self, other: Flops) -> Flops:
        """What is left of these without `other`."""
        return Flops(*(own - others for own, others in zip(self, other, strict=True)))


class FlopCounter(TorchDispatchMode):
    """Counts the operators that run in its context, by their shapes; it changes no value and waits for no device.

    It has the formulas of torch's `FlopCounterMode`, and those below, which that lacks. It is no subclass: that one
    does not tell what is computed again, runs compiled functions uncompiled, and its hooks on every tensor raise at
    gradients of gradients. Fake tensors are counted where it is entered after their mode.

    What torch.compile compiled is counted as far as it calls operators, matrix products by default; what it computes
    again is counted as backward. Kernels that are no operators of torch are not seen: those that the compiler wrote
    itself (flex_attention, max-autotune), and those of packages such as flash-attn.

    Args:
        when: Asked before an operator is counted; None counts all.

    Attributes:
        uncounted: Operators whose formula raised, and what.
    """

    supports_higher_order_operators = True

    def __init__(self, when: Callable[[], bool] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._when = when
        self._forward = self._backward = self._recomputed = 0
        self.uncounted: dict[str, str] = {}

    @property
    def flops(self) -> Flops:
        """What was counted so far."""
        return Flops(self._forward, self._backward, self._recomputed)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets compiled functions run as they are: under modes of users torch calls the original instead."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # nested and distributed tensors: what they call for their parts comes here then
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula and (self._when is None or self._when()):
            try:
                count = formula(*args, **kwargs, out_val=result)
            except Exception as error:  # training goes on, whatever an operator's arguments are in this torch
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
    """Counts a forward and a backward pass without computing them, for models that are compiled.

    Their own steps are not counted: torch compiles anew for a step with a counter, and does not show what its kernels
    compute. So the model's own code is called, uncompiled, with fake tensors in place of its weights and the batch.

    Args:
        model: Stays untouched. It is called with the batch's columns by name, or with its elements.
        batch: On any device.
        context: In which the forward pass is computed (autocast).

    Raises:
        RuntimeError: If the model cannot be called in this way, or what it does depends on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(weight) for name, weight in weights.items()}
    named = {**batch} if isinstance(batch, Mapping) else {}
    elements = () if named else tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    inputs = tree_map_only(torch.Tensor, mode.from_tensor, (elements, named))
    counter = FlopCounter()
    try:
        with torch.compiler.set_stance("force_eager"), mode, counter:
            with context:
                outputs = torch.func.functional_call(model, fakes, *inputs)
            torch.autograd.backward([loss.sum() for loss in _losses(outputs)])
    except Exception as error:  # anything, from the user's own code
        raise RuntimeError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return counter.flops


def _losses(outputs: Any) -> list[torch.Tensor]:
    """The loss where the model returns one, else all that it returns."""
    is_mapping = isinstance(outputs, Mapping)
    loss = outputs.get("loss") if is_mapping else None
    found = [loss] if isinstance(loss, torch.Tensor) else tree_leaves({**outputs} if is_mapping else outputs)
    return [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]


def _is_checkpointed() -> bool:
    """Whether the caller is a function that `torch.utils.checkpoint` calls for the second time.

    Asked in a backward pass with gradients on, which is so for a gradient of gradients as well: the stack tells.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Scores and their product with the values; query [batch, heads, length, size], key and value alike.

    Of grouped heads each key and value is used by several queries.
    """
    scores = 2 * query.numel() * key.shape[-2]
    return scores + 2 * math.prod(query.shape[:-1]) * value.shape[-2] * value.shape[-1], 0


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Two products for each one of the forward pass, and the scores again."""
    return 2 * _attention(query, key, value)[0], 2 * query.numel() * key.shape[-2]


def _flex_attention_backward(*args: Any, **__: Any) -> tuple[int, int]:
    return _attention_backward(None, *args)


def _convolution_backward(
    gradient: Any, image: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: Any, output_mask: Any, **_: Any,
) -> tuple[int, int]:  # fmt: skip
    """As often as the forward pass as gradients are needed; torch's own formula forgets the groups of weights."""
    positions = math.prod((image if transposed else gradient).shape[2:])
    return 2 * image.shape[0] * positions * weight.numel() * (output_mask[0] + output_mask[1]), 0


def _recurrent(inputs: Any, weights: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Each matrix of weights once for each row; inputs [..., size]."""
    rows = inputs.numel() // inputs.shape[-1]
    return 2 * rows * sum(weight.numel() for weight in weights if weight.ndim == 2), 0


def _recurrent_layer(inputs: Any, of_inputs: Any, of_state: Any, *_: Any, **__: Any) -> tuple[int, int]:
    return _recurrent(inputs, (of_inputs, of_state))


def _twice(formula: Formula) -> Formula:
    def backward(*args: Any, **kwargs: Any) -> tuple[int, int]:
        return 2 * formula(*args, **kwargs)[0], 0

    return backward


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """Products of groups (experts), which divide the rows, the columns, or what is summed over; or of all, in 3D."""
    rows = left.shape[-2] * left.shape[-1] if right.ndim == 2 else left.numel()
    return 2 * rows * right.shape[-1], 0


def _product(left: Any, *_: Any, out_val: Any, **__: Any) -> tuple[int, int]:
    return 2 * out_val.numel() * left.shape[-1], 0


def _convolution(image: Any, weight: Any, *_: Any, out_val: Any, **__: Any) -> tuple[int, int]:
    return 2 * out_val.numel() * math.prod(weight.shape[1:]), 0


def _found(formulas: dict[str, Formula]) -> dict[Any, Formula]:
    """Those of the operators that this torch has."""
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
        # Composite operators come as such in inference mode, and those of a nested tensor's values.
        "linear": _product,
        "matmul": _product,
        "conv1d": _convolution,
        "conv2d": _convolution,
        "conv3d": _convolution,
        "scaled_dot_product_attention": _attention,
    }
)  # fmt: skip


def _let_through(operator: Any) -> None:
    """Tells an operator of higher order what to do under a counter; torch 2.6 refuses modes that it does not know."""

    def counted(counter: FlopCounter, *args: Any, **kwargs: Any) -> Any:
        return counter.__torch_dispatch__(operator, (), args, kwargs)

    operator.py_impl(FlopCounter)(counted)


_let_through(flex_attention)
_let_through(flex_attention_backward)

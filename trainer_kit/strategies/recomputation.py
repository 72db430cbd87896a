"""Recomputation of a module's activations in the backward pass, with what its forward pass began with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.rng import KeptGenerators
from trainer_kit.utils.wrappers import model_class

_COMPARED = 3
"""Forward passes of each module with which recomputation is compared."""

_SAMPLES = 256
"""Numbers of each tensor that are compared."""

_aten = torch.ops.aten
# Products without a batch dimension: the scores of unfused attention would need more memory than the activations.
SLOW = {
    getattr(_aten, name).default
    for name in (
        "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)
}  # fmt: skip
"""Operators that are slow to compute: the policy "save_matmuls" keeps their results."""

Context = contextlib.AbstractContextManager[Any]
Contexts = Callable[[], tuple[Context, Context]]


def _no_contexts() -> tuple[Context, Context]:
    return contextlib.nullcontext(), contextlib.nullcontext()


_is_comparing = True


@contextlib.contextmanager
def without_comparisons() -> Iterator[None]:
    """Compare nothing in this context, so that a step is measured as all but the first ones are."""
    global _is_comparing
    before, _is_comparing = _is_comparing, False
    try:
        yield
    finally:
        _is_comparing = before


class Recomputation:
    """The forward passes of a module whose activations are recomputed in the backward pass.

    A recomputation begins with the buffers and with the states of the generators that the forward pass began with, and
    leaves them as they are: a batch norm counts each batch once. The recomputations of the first forward passes are
    compared with these, since gradients are wrong where they differ.

    Args:
        module: The module.

    Attributes:
        left: Number of forward passes with which recomputation is compared still.
        changing: The buffers that forward passes have changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.left = _COMPARED
        self.changing: set[tuple[nn.Module, str]] = set()

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contexts: Contexts = _no_contexts,
    ) -> Any:
        """Run a forward pass.

        Args:
            function: The module's forward pass.
            args: Its arguments by position.
            kwargs: Its arguments by name.
            contexts: Returns contexts for the forward pass and for its recomputation.

        Returns:
            The output.

        Raises:
            ValueError: In the backward pass, if the recomputation differs.
        """
        compares = _is_comparing and self.left > 0 and _is_plain(torch.empty(()))  # else nothing has values
        start = _Start(self, kwargs)
        if kwargs:
            function = functools.partial(function, **kwargs)
        if compares:
            self.left -= 1
            function = _Compared(self.module, function)

        def restoring() -> tuple[Context, Context]:
            forward, again = contexts()
            return forward, _Restored(start, again)

        with set_checkpoint_early_stop(False) if compares else contextlib.nullcontext():
            output = checkpoint(function, *args, use_reentrant=False, context_fn=restoring)
        start.keep_changed(compares)
        return output


class _Start:
    """The state that a forward pass begins with.

    Args:
        recomputation: Its recomputation.
        kwargs: Arguments by name, whose devices torch does not look at.

    Attributes:
        generators: States of the generators.
        buffers: The buffers that the pass changes; all of them before `keep_changed`.
    """

    def __init__(self, recomputation: Recomputation, kwargs: dict[str, Any]) -> None:
        self._recomputation = recomputation
        self.generators = KeptGenerators(next((each.device for each in tensors(kwargs) if each.is_cuda), None))
        copies: dict[int, torch.Tensor] = {}  # a tensor may have several names
        self.buffers = [
            _Buffer(owner, name, tensor, _copy(tensor, copies))
            for owner in recomputation.module.modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None and not tensor.is_inference()
        ]

    def keep_changed(self, compares: bool) -> None:
        """Keep the buffers that the pass has changed, or that an earlier one has.

        One that has another size now is a cache that has grown: an attribute may say how large it is.

        Args:
            compares: Whether to look for changes that torch does not count as a new version of a tensor.
        """
        known = self._recomputation.changing
        known.update(each.place for each in self.buffers if each.is_changed or (compares and each.differs))
        self.buffers = [each for each in self.buffers if each.place in known and each.has_its_size]


class _Buffer:
    """A buffer before a forward pass.

    Args:
        owner: Its module.
        name: Its name in the module.
        tensor: The buffer.
        value: A copy of it.
    """

    def __init__(self, owner: nn.Module, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self.place = owner, name
        self.value = value
        self._tensor, self._version = tensor, tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether the module has replaced the buffer, or has changed it in place and torch has counted that."""
        return self.current is not self._tensor or self._tensor._version != self._version

    @property
    def differs(self) -> bool:
        """Whether its values have changed, as far as they can be compared."""
        return _is_plain(self._tensor) and not torch.equal(self._tensor, self.value)

    @property
    def has_its_size(self) -> bool:
        """Whether it has the size that it had."""
        return self.current is not None and self.current.shape == self.value.shape

    @property
    def current(self) -> torch.Tensor | None:
        owner, name = self.place
        return owner._buffers.get(name)

    @current.setter
    def current(self, value: torch.Tensor | None) -> None:
        owner, name = self.place
        owner._buffers[name] = value


class _Restored:
    """Context of a recomputation, entered once for each backward pass.

    Args:
        start: What the forward pass began with.
        context: Context that the policy needs.
    """

    def __init__(self, start: _Start, context: Context) -> None:
        self._start, self._context = start, context
        self._end = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            copies: dict[int, torch.Tensor] = {}
            for each in self._start.buffers:
                stack.callback(setattr, each, "current", each.current)
                each.current = _copy(each.value, copies)
            stack.callback(self._start.generators.swapped().restore)
            stack.enter_context(self._context)
            self._end = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._end.__exit__(*error)


class _Compared:
    """A forward pass whose recomputation is compared with it.

    Args:
        module: The module.
        function: Its forward pass.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function
        self._first: list[torch.Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        with _SampledInputs() as inputs:
            output = self._function(*args)
        samples = inputs.samples + _samples(output)
        if self._first is None:
            self._first = samples
            return output
        with _disable_current_modes():
            difference = _largest_difference(self._first, samples)
        if difference is not None:
            raise differing(self._module, difference)
        return output


def differing(module: nn.Module, difference: str) -> ValueError:
    """Return the error for a module whose recomputation differs from its forward pass."""
    return ValueError(
        f"gradient_checkpointing computes a {model_class(module).__name__} again in the backward pass, which differs "
        f"from the forward pass ({difference}), so that gradients would be wrong: it uses what changes in between, "
        "such as a torch.Generator, a counter or another attribute of its own, a weight, an argument that is changed "
        "later or, with policy='save_matmuls', a kept result; leave it out by gradient_checkpointing={'modules': "
        "[...]}, which names the others"
    )


class _SampledInputs(TorchDispatchMode):
    """Collects samples of what the slow operators of a pass take: their results may be kept, or multiplied by zero."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples: list[torch.Tensor] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: else torch 2.13 would never compile what is called in this mode first."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SLOW:
            self.samples += _samples((args, kwargs))
        return func(*args, **(kwargs or {}))


def _samples(values: Any) -> list[torch.Tensor]:
    with _disable_current_modes():  # a policy does not see these operations
        return [_sample(each) for each in tensors(values) if _is_plain(each) and each.is_floating_point()]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.detach().flatten()
    return numbers[:: numbers.numel() // _SAMPLES | 1].clone()  # an odd step takes them from all columns


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values, and lies in memory as usual."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _copy(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of a tensor, the same for the same tensor."""
    if id(tensor) not in copies:
        copies[id(tensor)] = tensor.detach().clone()
    return copies[id(tensor)]


def _largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> str | None:
    """Return a description of the largest difference; None without one beyond that of other kernels and rounding."""
    if [each.shape for each in first] != [each.shape for each in second]:
        return "its operations take other shapes, or are others"
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        expected, found = one.cpu().double(), other.cpu().double()
        difference = float((found - expected).norm() / expected.norm().clamp(min=torch.finfo(one.dtype).tiny))
        is_cast = torch.is_autocast_enabled(one.device.type)
        precision = torch.get_autocast_dtype(one.device.type) if is_cast else one.dtype
        if difference > max(torch.finfo(precision).eps, torch.finfo(one.dtype).eps) ** 0.5:
            largest = max(largest, difference)
    return f"by {largest:.2g} of the size of its values" if largest else None

"""Activation checkpointing of any module, by a replacement of its `forward`, so that the names of its weights stay."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer_kit.config.checkpointing_options import CheckpointingOptions
from trainer_kit.utils.module_patterns import outermost_matches, prefixes
from trainer_kit.utils.repeated_blocks import repeated_blocks
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.units import join_names
from trainer_kit.utils.wrappers import model_class

_aten = torch.ops.aten
# Products without a batch dimension: the scores of unfused attention would need more memory than the activations.
_SLOW = {
    getattr(_aten, name).default
    for name in (
        "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)
}  # fmt: skip
"""Operators whose results the policy "save_matmuls" keeps."""

_OWN = ("activation_checkpointing", "gradient_checkpointing")
"""Prefixes of transformers' methods: transformers 5 renamed them."""

_observers: list[Callable[[Any], None]] = []


def enable_own_checkpointing(model: nn.Module) -> bool:
    """Enable a model's own activation checkpointing; return False if it has none."""
    if not getattr(model, "supports_gradient_checkpointing", True):  # transformers' answer for such models
        return False
    for name in _OWN:
        if enable := getattr(model, f"{name}_enable", None):
            keyword, takes = f"{name}_kwargs", inspect.signature(enable).parameters
            enable(**({keyword: {"use_reentrant": False}} if keyword in takes else {}))
            return True
    return False


def checkpoint_modules(model: nn.Module, options: CheckpointingOptions) -> None:
    """Let modules of a model recompute their activations in the backward pass.

    Args:
        model: The user's model.
        options: Which modules, and which activations.

    Raises:
        ValueError: If no module is found.
    """
    restore_modules(model)
    _disable_own_checkpointing(model)
    for module in _chosen(model, options):
        module.forward = _CheckpointedForward(module, options.policy)
    for module in model.modules():
        if is_transformers_model(module) and "use_cache" in inspect.signature(module.forward).parameters:
            module.forward = _ForwardWithoutCache(module)


def _disable_own_checkpointing(model: nn.Module) -> None:
    for name in _OWN:
        if disable := getattr(model, f"{name}_disable", None):
            if getattr(model, f"is_{name}", False):
                disable()
            return


def restore_modules(model: nn.Module) -> None:
    """Undo `checkpoint_modules`."""
    for module in model.modules():
        while isinstance(replaced := vars(module).get("forward"), _ReplacedForward):
            replaced.restore()


@contextlib.contextmanager
def watching_kept_results(observer: Callable[[Any], None]) -> Iterator[None]:
    """Call `observer` with each result that a policy keeps for the backward pass."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _chosen(model: nn.Module, options: CheckpointingOptions) -> list[nn.Module]:
    if options.modules is None:
        found = [*repeated_blocks(model)]
        if not found:
            raise ValueError(
                f"gradient_checkpointing finds no block that {model_class(model).__name__} repeats (a ModuleList or "
                "Sequential of modules of one class); name its modules by gradient_checkpointing={'modules': [...]}"
            )
    else:
        found = _matched(model, options.modules)
    return [*dict.fromkeys(found)][:: options.every]


def _matched(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """Return the outermost modules that match any of the patterns, in the order of the model."""
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matches = outermost_matches(model, pattern, _has_forward)
        if not matches:
            blocks = {id(block) for block in repeated_blocks(model)}
            examples = {
                type(each).__name__: name for name, each in reversed([*model.named_modules()]) if id(each) in blocks
            }
            such_as = f", such as {join_names(f'{name!r} ({kind})' for kind, name in examples.items())}"
            raise ValueError(
                f"gradient_checkpointing: {pattern!r} matches no module with a forward pass inside "
                f"{model_class(model).__name__}; use a pattern of module names or of class names"
                f"{such_as if examples else ''}"
            )
        found.update(matches)
    return [
        module
        for name, module in model.named_modules()
        if name in found and not any(outer in found for outer in prefixes(name))
    ]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class _ReplacedForward:
    """A callable in place of a module's `forward`; a copy of the module has a copy of it.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward
        self.__wrapped__ = module.forward  # for inspect.signature
        self._was_replaced = "forward" in vars(module)

    def restore(self) -> None:
        if self._was_replaced:
            self.module.forward = self.forward
        else:
            del self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _ForwardWithoutCache(_ReplacedForward):
    """A transformers model's forward pass, without the key-value cache, which recomputation would fill twice."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = False
        return self.forward(*args, **kwargs)


class _CheckpointedForward(_ReplacedForward):
    """A forward pass whose activations are recomputed in the backward pass.

    Recomputation begins with the buffers that the forward pass began with, and leaves them as they are: a batch norm
    counts each batch once.

    Args:
        module: The module.
        policy: See `CheckpointingOptions`.
    """

    def __init__(self, module: nn.Module, policy: str) -> None:
        super().__init__(module)
        self._selective = policy == "save_matmuls"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        function = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        if torch.compiler.is_compiling():  # a compiled graph changes buffers once, and knows only torch's own contexts
            if not self._selective:
                return checkpoint(function, *args, use_reentrant=False)
            selective = functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)
            return checkpoint(function, *args, use_reentrant=False, context_fn=selective)
        buffers = [_Buffer(*place) for place in _buffers(self.module)]
        with contextlib.ExitStack() as entered:  # torch 2.9 does not end the context of a pass that raises
            contexts = functools.partial(_contexts, self.module, buffers, self._selective, entered)
            output = checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
        buffers[:] = [each for each in buffers if each.is_changed]
        return output


def _contexts(
    module: nn.Module, buffers: list[_Buffer], selective: bool, entered: contextlib.ExitStack
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the contexts of a module's forward pass and of its recomputation."""
    if not selective:
        return contextlib.nullcontext(), _Recomputation(module, contextlib.nullcontext(), buffers)
    forward, again = create_selective_checkpoint_contexts(_keep_matmuls)
    return _without_cast_cache(forward, entered), _Recomputation(module, again, buffers)


@contextlib.contextmanager
def _without_cast_cache(
    context: contextlib.AbstractContextManager[Any], entered: contextlib.ExitStack
) -> Iterator[None]:
    """Enter a context without autocast's cache: a recomputation would not find the cast of a weight used before."""
    entered.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(False)
    if _observers:
        entered.enter_context(_WatchedResults())  # type: ignore[no-untyped-call]
    entered.enter_context(context)
    try:
        yield
    finally:
        entered.close()


class _Buffer:
    """A buffer before a forward pass.

    Args:
        owner: Its module.
        name: Its name in the module.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        tensor = owner._buffers[name]
        assert tensor is not None
        self.owner, self.name = owner, name
        self.value = tensor.detach().clone()
        self._tensor, self._version = tensor, tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether the module may have replaced the buffer, or changed it in place."""
        if self.owner._buffers.get(self.name) is not self._tensor or self._tensor._version != self._version:
            return True
        # torch's batch norm does not count its changes of running statistics as a new version.
        return self.owner.training and "running_mean" in self.owner._buffers


class _Recomputation:
    """Context of a recomputation, entered once for each backward pass.

    Args:
        module: Module that is recomputed.
        context: Context that the policy needs.
        buffers: Buffers that the forward pass changes.
    """

    def __init__(
        self, module: nn.Module, context: contextlib.AbstractContextManager[Any], buffers: list[_Buffer]
    ) -> None:
        self._module, self._context, self._buffers = module, context, buffers
        self._present: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._present = [each.owner._buffers[each.name] for each in self._buffers]
        for each in self._buffers:
            each.owner._buffers[each.name] = each.value.clone()
        self._context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, error, trace)
        for each, tensor in zip(self._buffers, self._present, strict=True):
            each.owner._buffers[each.name] = tensor
        self._present = []
        if "has been mutated" in str(error):
            raise ValueError(
                "gradient_checkpointing with policy='save_matmuls' keeps a result that a "
                f"{model_class(self._module).__name__} changes in place, such as by ReLU(inplace=True); use "
                "inplace=False there, or policy='all'"
            ) from error


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, tensor in owner._buffers.items()
        if tensor is not None and not tensor.is_inference()
    ]


def _keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether "save_matmuls" keeps the result of an operator.

    Not that of an attention with dropout: later dropout would differ if recomputation left it out.
    """
    if operator not in _SLOW:
        return False
    names = [each.name for each in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return not given.get("dropout_p", 0.0)


class _WatchedResults(TorchDispatchMode):
    """Calls the observers with the results of a forward pass that "save_matmuls" keeps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            for observer in _observers:
                observer(result)
        return result

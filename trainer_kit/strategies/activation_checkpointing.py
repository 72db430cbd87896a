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
from trainer_kit.strategies.recomputation import SLOW, Context, Recomputation, differing
from trainer_kit.utils.module_patterns import outermost_matches, prefixes
from trainer_kit.utils.repeated_blocks import blocks_in_rows, repeated_blocks
from trainer_kit.utils.transformers_models import place_of_use_cache
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class

_OWN = ("activation_checkpointing", "gradient_checkpointing")
"""Prefixes of transformers' methods: transformers 5 renamed them."""

_observers: list[Callable[[Any], None]] = []
_RECOMPUTATION = "_trainer_kit_recomputation"
"""Attribute of modules that a model's own activation checkpointing recomputes."""


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


def guard_own_checkpointing(model: nn.Module) -> None:
    """Let a model's own activation checkpointing recompute as that of `checkpoint_modules` does."""
    recompute = _OwnCheckpointing()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):  # of transformers
            vars(module)["_gradient_checkpointing_func"] = recompute


class _OwnCheckpointing:
    """The function by which modules of a transformers model call what recomputes its activations.

    Attributes:
        has_run: Whether a forward pass with gradients has called it, not compiled.
    """

    def __init__(self) -> None:
        self.has_run = False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.has_run = True
        module = _module_of(function)
        if module is None:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        if _RECOMPUTATION not in vars(module):
            vars(module)[_RECOMPUTATION] = Recomputation(module)
        return vars(module)[_RECOMPUTATION](function, args, kwargs)


def warn_of_unused_checkpointing(model: nn.Module) -> None:
    """Warn if no forward pass has gone through a module whose activations are to be recomputed.

    Args:
        model: The user's model, after a step without compiled code.
    """
    found = [each for module in model.modules() for each in _checkpointing_of(module)]
    if not found or any(each.has_run for each in found):
        return
    classes = {model_class(each.module).__name__: None for each in found if isinstance(each, _CheckpointedForward)}
    warn(
        "gradient_checkpointing has no effect: the first step did not call "
        f"{join_names(classes) or 'what is to be recomputed'} with gradients; name modules that it calls by "
        "gradient_checkpointing={'modules': [...]}, or set it to False"
    )


def _checkpointing_of(module: nn.Module) -> Iterator[_CheckpointedForward | _OwnCheckpointing]:
    own = vars(module).get("_gradient_checkpointing_func")
    if isinstance(own, _OwnCheckpointing):
        yield own
    replaced = vars(module).get("forward")
    while isinstance(replaced, _ReplacedForward):
        if isinstance(replaced, _CheckpointedForward):
            yield replaced
        replaced = replaced.forward


def _module_of(function: Any) -> nn.Module | None:
    """Return the module whose method a function is, or gets as its first argument; None if there is none."""
    given: tuple[Any, ...] = ()
    while isinstance(function, functools.partial):
        function, given = function.func, (*function.args, *given)
    owner = getattr(function, "__self__", given[0] if given else None)
    return owner if isinstance(owner, nn.Module) else None


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
        if (place := place_of_use_cache(module)) is not None:
            module.forward = _ForwardWithoutCache(module, place)


def _disable_own_checkpointing(model: nn.Module) -> None:
    for name in _OWN:
        if disable := getattr(model, f"{name}_disable", None):
            if getattr(model, f"is_{name}", False):
                disable()
            return


def restore_modules(model: nn.Module) -> None:
    """Undo `checkpoint_modules`, and forget what `guard_own_checkpointing` has found."""
    for module in model.modules():
        vars(module).pop(_RECOMPUTATION, None)
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
        found = [*repeated_blocks(model)] or [*blocks_in_rows(model)]
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
    """A transformers model's forward pass, without the key-value cache, which recomputation would fill twice.

    Args:
        module: The model.
        place: Place of `use_cache` among its parameters.
    """

    def __init__(self, module: nn.Module, place: int) -> None:
        super().__init__(module)
        self._place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and kwargs.get("past_key_values") is None:
            if len(args) > self._place:
                args = (*args[: self._place], False, *args[self._place + 1 :])
            else:
                kwargs["use_cache"] = False
        return self.forward(*args, **kwargs)


class _CheckpointedForward(_ReplacedForward):
    """A forward pass whose activations are recomputed in the backward pass, see `Recomputation`.

    Args:
        module: The module.
        policy: See `CheckpointingOptions`.

    Attributes:
        has_run: Whether it has run with gradients, not compiled.
    """

    def __init__(self, module: nn.Module, policy: str) -> None:
        super().__init__(module)
        self.has_run = False
        self._is_selective = policy == "save_matmuls"
        self._recomputation = Recomputation(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph changes buffers once, and knows only torch's own contexts
            function = functools.partial(self.forward, **kwargs) if kwargs else self.forward
            if not self._is_selective:
                return checkpoint(function, *args, use_reentrant=False)
            selective = functools.partial(create_selective_checkpoint_contexts, _keep_matmuls)
            return checkpoint(function, *args, use_reentrant=False, context_fn=selective)
        self.has_run = True
        if not self._is_selective:
            return self._recomputation(self.forward, args, kwargs)
        with contextlib.ExitStack() as entered:  # torch 2.9 does not end the context of a pass that raises
            contexts = functools.partial(_selective_contexts, self.module, entered)
            return self._recomputation(self.forward, args, kwargs, contexts)


def _selective_contexts(module: nn.Module, entered: contextlib.ExitStack) -> tuple[Context, Context]:
    """Return the contexts of a module's forward pass and of its recomputation, with "save_matmuls"."""
    forward, again = create_selective_checkpoint_contexts(_keep_matmuls)
    forward.respect_saved_tensors_hooks = False  # without a choice, torch 2.15 warns in an estimate
    return _without_cast_cache(forward, entered), _Explained(module, again)


class _Explained:
    """The context of a recomputation with "save_matmuls", whose errors say what to do.

    Args:
        module: The module.
        context: The context.
    """

    def __init__(self, module: nn.Module, context: Context) -> None:
        self._module, self._context = module, context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, error, trace)
        if "has been mutated" in str(error):
            raise ValueError(
                "gradient_checkpointing with policy='save_matmuls' keeps a result that a "
                f"{model_class(self._module).__name__} changes in place, such as by ReLU(inplace=True); use "
                "inplace=False there, or policy='all'"
            ) from error
        if "not found in storage" in str(error):
            raise differing(self._module, "it has other operations") from error


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


def _keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether "save_matmuls" keeps the result of an operator.

    Not that of an attention with dropout: later dropout would differ if recomputation left it out.
    """
    if operator not in SLOW:
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

"""An optimizer's step without what torch puts around it: the profiler's scope, hooks, marks for the compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from trainer_kit.utils.late_compiler import call_as_is

_GLOBAL_HOOKS = [
    getattr(torch_optimizer, name, None) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]
_OF_SHARDS = ("dtensor", "sharding", "sharded", "placement")
"""Words by which torch's errors about sharded tensors are known."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def take_step(optimizer: Optimizer) -> None:
    """Step the optimizer.

    torch opens a scope of its profiler around each step, which takes as long as stepping a small model. It is left out
    if there is no profiler, no hook, and nothing in place of the optimizer's own `step`. So are the marks for the
    compiler, which torch imports for them: this call is not compiled.
    """
    hooked = type(optimizer).step
    replaced = vars(optimizer).get("step")
    if _has_effect(optimizer, hooked, replaced):
        optimizer.step()
        return
    if replaced is not None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # by which a schedule knows that a step was taken
    step = hooked.__wrapped__  # type: ignore[attr-defined]
    if getattr(step, "__code__", None) is not _MARKED_CODE:
        step(optimizer)
        return
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        step.__wrapped__(optimizer)
    finally:
        torch.set_grad_enabled(before)


def explain_failure(optimizer: Optimizer, error: RuntimeError, is_sharded: bool) -> None:
    """Say what to do if an optimizer's class has no step, or its step needs all elements of a sharded parameter.

    Args:
        optimizer: The optimizer.
        error: What its step raised.
        is_sharded: Whether its parameters may be sharded.

    Raises:
        RuntimeError: If that is the error's cause.
    """
    message = str(error)
    if isinstance(error, NotImplementedError) and not message:
        raise NotImplementedError(
            f"optimizer={type(optimizer).__name__} does not implement its step; define step(self, closure=None) in its "
            "class, or use another optimizer"
        ) from error
    if is_sharded and any(each in message.lower() for each in _OF_SHARDS):
        raise RuntimeError(
            f"optimizer={type(optimizer).__name__} cannot step on sharded parameters ({message.splitlines()[0]}); use "
            "AdamW, Adam or SGD, or strategy=DDP(), under which each process has all parameters"
        ) from error


def _has_effect(optimizer: Optimizer, hooked: Any, replaced: Any) -> bool:
    """Return whether `optimizer.step()` does more than the function that torch wraps as `hooked`."""
    if getattr(hooked, "__code__", None) is not _HOOKED_CODE:
        return True
    if replaced is not None:  # by a schedule, which wraps the method of the class to count the steps?
        counts = getattr(replaced, "_wrapped_by_lr_sched", None) is True
        if not counts or getattr(replaced, "__wrapped__", None) is not hooked:
            return True
    hooks = vars(optimizer)
    return (
        any(each is None or len(each) > 0 for each in _GLOBAL_HOOKS)
        or any(hooks.get(name) != {} for name in _HOOKS)
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


def _code_around(wrap: Any) -> Any:
    """Return the code of what one of torch's decorators makes of a step; None without the decorator."""
    return None if wrap is None else getattr(wrap(lambda optimizer: None), "__code__", None)


_HOOKED_CODE = _code_around(getattr(Optimizer, "profile_hook_step", None)) or object()
_MARKED_CODE = _code_around(getattr(torch_optimizer, "_use_grad_for_differentiable", None)) or object()

call_as_is(Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict)

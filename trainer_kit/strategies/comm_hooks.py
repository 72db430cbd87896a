"""torch's communication hooks of DistributedDataParallel, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

_HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
}
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}


def check(name: str, wrapper: str) -> None:
    """Check the names of a hook and of its wrapper.

    Raises:
        ValueError: If a name is not known, or the hook fails in torch.
    """
    if name == "batched_power_sgd":  # torch 2.9 to 2.13: its matrices have two dimensions, its own check asks for three
        raise ValueError("the communication hook 'batched_power_sgd' fails in torch; use 'power_sgd'")
    if name not in _HOOKS or wrapper not in ("no", *_WRAPPERS):
        raise ValueError(
            f"the communication hook {name!r} with the wrapper {wrapper!r} is not known; use one of "
            f"{', '.join(_HOOKS)}, and 'no', 'fp16' or 'bf16'"
        )


def register(
    module: DistributedDataParallel, name: str, wrapper: str = "no", options: Mapping[str, Any] | None = None
) -> None:
    """Let a module send gradients through a communication hook.

    Args:
        module: The module.
        name: "fp16", "bf16" (the gradients' dtype on the way) or "power_sgd".
        wrapper: "fp16" or "bf16", the dtype of what PowerSGD sends; "no": the gradients' own.
        options: Arguments of `PowerSGDState`.
    """
    hook = _HOOKS[name] if wrapper == "no" else _WRAPPERS[wrapper](_HOOKS[name])
    state = powerSGD_hook.PowerSGDState(None, **(options or {})) if name == "power_sgd" else None
    # Wrapped in a lambda: torch refuses its own bf16 hook on gloo by name, although gloo can send bfloat16.
    module.register_comm_hook(state, lambda state, bucket: hook(state, bucket))

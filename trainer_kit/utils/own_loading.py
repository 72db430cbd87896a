"""Modules that load their tensors by code of their own, which may give a tensor another shape."""

from __future__ import annotations

import torch

_TORCH_MODULES = "torch.nn.modules."
"""Package of torch's own modules, whose `_load_from_state_dict` keeps all shapes."""

EXTRA_STATE = "_extra_state"
"""Last part of the name of what `get_extra_state` returns, which `set_extra_state` loads."""

_TORCH_DISTRIBUTED = "torch.distributed."
"""Package of `fully_shard`, which adds a hook to each module that it shards."""


def loads_itself(module: torch.nn.Module) -> bool:
    """Return whether a module overrides `_load_from_state_dict` or has a load-state-dict pre-hook."""
    if not module._load_from_state_dict.__module__.startswith(_TORCH_MODULES):
        return True
    hooks = (getattr(each, "hook", each) for each in module._load_state_dict_pre_hooks.values())
    return any(not hook.__module__.startswith(_TORCH_DISTRIBUTED) for hook in hooks)


def prefixes_of_own_loading(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the tensors that modules load themselves, also those of modules inside them."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if loads_itself(module):
            found.append(prefix)
        elif type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            found.append(f"{prefix}{EXTRA_STATE}")
    return tuple(found)

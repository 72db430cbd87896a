"""`StateHooks`: functions that an `Accelerator` calls when it saves and loads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


class StateHooks:
    """The part of an `Accelerator` that takes functions to call when it saves and loads."""

    _save_hooks: OrderedDict[int, Callable[..., Any]]
    _load_hooks: OrderedDict[int, Callable[..., Any]]

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call a function at each `save_state`, on all processes, before the checkpoint is written.

        Args:
            hook: Called with the prepared models, a list of their states by position, and a temporary folder, whose
                files become part of the checkpoint. A state that it removes from the list on the main process is not
                saved.

        Returns:
            A handle whose `remove()` undoes this.
        """
        return _registered_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call a function at each `load_state`, on all processes, before anything is restored.

        Args:
            hook: Called with a list of the prepared models and the checkpoint's folder. A model that it removes from
                the list is not loaded.

        Returns:
            A handle whose `remove()` undoes this.
        """
        return _registered_hook(self._load_hooks, hook)


def _registered_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

"""Release of memory, and the search for a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from trainer_kit.accelerator.state import PartialState
from trainer_kit.strategies.base import clear_frames
from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.single import SingleDevice

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free the memory that torch keeps for later tensors.

    Args:
        garbage_collection: Whether to free unreachable Python objects first.
    """
    if garbage_collection:
        gc.collect()
    _device_info().empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free cached memory, and return a None for each object, which the caller assigns to its names."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an error says that the device's or the host's memory is exhausted."""
    return _device_info().oom_message(exception) is not None


def _device_info() -> DeviceInfo:
    """Return what is known of the device, without joining the process group or starting CUDA."""
    if "strategy" in PartialState._shared_state:
        return PartialState().strategy.device_info
    is_unused = torch.cuda.is_available() and not torch.cuda.is_initialized()
    return SingleDevice("cpu" if is_unused else None).device_info


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function to be called again with a smaller batch size if it runs out of memory.

    The call starts from the beginning: what it has trained is lost. `TrainingArguments(auto_find_batch_size=True)`
    loses nothing.

    Args:
        function: Takes the batch size as its first argument, which the caller leaves out; None returns a decorator.
        starting_batch_size: Batch size of the first call.
        reduce_batch_size_fn: Returns the next batch size; None: 90 % of the last one.

    Raises:
        TypeError: At a call that gives the batch size too.
        RuntimeError: At a call for which no batch size fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        parameters = [*inspect.signature(function).parameters]
        if len(parameters) < len(args) + 1:
            raise TypeError(
                f"{function.__name__}() got too many arguments; leave out {parameters[:1]}, which the decorator gives"
            )
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                clear_frames(error)
            clear_device_cache(garbage_collection=True)
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.")

    return decorated

"""Small helpers under accelerate's names."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from trainer_kit.accelerator.state import PartialState
from trainer_kit.accelerator.wrappers import restore_forward
from trainer_kit.checkpoint import load_checkpoint_in_model, save_tensors
from trainer_kit.checkpoint.format.safetensors_writer import untie
from trainer_kit.launch.config import write_basic_config
from trainer_kit.launch.processes import set_variables
from trainer_kit.utils.pytree import map_tensors
from trainer_kit.utils.units import format_size
from trainer_kit.utils.wrappers import without_wrappers

logger = logging.getLogger("trainer_kit")

__all__ = [
    "PrepareForLaunch",
    "clean_state_dict_for_safetensors",
    "compare_versions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "is_compiled_module",
    "is_port_in_use",
    "is_torch_version",
    "load",
    "load_checkpoint_in_model",
    "merge_dicts",
    "patch_environment",
    "recursive_getattr",
    "save",
    "str_to_bool",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": lambda own, other: own > other,
    ">=": lambda own, other: own >= other,
    "==": lambda own, other: own == other,
    "!=": lambda own, other: own != other,
    "<=": lambda own, other: own <= other,
    "<": lambda own, other: own < other,
}


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> torch.nn.Module:
    """Return the user's own module from a prepared one, see `Accelerator.unwrap_model`.

    Args:
        model: Prepared or not.
        keep_fp32_wrapper: If False, the forward pass is restored, without mixed precision.
        keep_torch_compile: If False, the wrapper of `torch.compile` is removed too.
        recursive: Without effect: no module inside the model is wrapped.
    """
    model = PartialState().strategy.unwrap(model)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    if not keep_fp32_wrapper:
        restore_forward(model)
    return model if keep_torch_compile else without_wrappers(model)


def wait_for_everyone() -> None:
    """Wait until all processes have arrived. Collective."""
    PartialState().wait_for_everyone()


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object on the main process, or with `save_on_each_node` on the first one of each machine.

    The file is written atomically, and readable without XLA.

    Args:
        obj: Any object, or with `safe_serialization` a dict of tensors.
        f: Path of the file.
        save_on_each_node: Whether each machine writes the file.
        safe_serialization: Whether to write safetensors instead of a pickle; the file's name must then end with
            `.safetensors`.

    Raises:
        ValueError: If the name has another ending.
    """
    path, state = Path(f), PartialState()
    if safe_serialization and path.suffix != ".safetensors":
        raise ValueError(f"safe_serialization=True writes safetensors, but the file is {str(path)!r}; name it so")
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    to_host = state.strategy.device_info.to_host
    if safe_serialization:
        save_tensors(obj, path.parent, path.stem, to_host=to_host)
        return

    def readable_anywhere(tensor: torch.Tensor) -> torch.Tensor:
        return to_host(tensor.detach()) if tensor.device.type == "xla" else tensor

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        torch.save(map_tensors(readable_anywhere, obj), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object that `torch.save` wrote; `weights_only` must be given as False for more than tensors."""
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables, in capitals, within a block."""
    with set_variables({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for a text such as "yes" or "true", and 0 for one such as "no" or "false"; with `to_bool`, a bool.

    Raises:
        ValueError: If the text is neither.
    """
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True if to_bool else 1
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return False if to_bool else 0
    raise ValueError(f"{value!r} is no truth value; use 'yes' or 'no'")


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version compares so: `is_torch_version(">=", "2.4")`."""
    return compare_versions(torch.__version__, operation, version)


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether the version of a library, by name, or a version compares so with another one.

    Raises:
        ValueError: If the operation is not known.
    """
    if operation not in _COMPARISONS:
        raise ValueError(f"operation={operation!r} is not known; use one of {', '.join(_COMPARISONS)}")
    version = str(library_or_version)
    if not version[:1].isdigit():
        from importlib.metadata import version as installed

        version = installed(version)
    return _COMPARISONS[operation](TorchVersion(version), requirement_version)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` wraps a module."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a program listens at this port of the machine; None: 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port or 29500))) == 0


def get_free_port() -> int:
    """Return a port of this machine at which no program listens now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class PrepareForLaunch:
    """A function as `torch.multiprocessing.start_processes` calls it, with the number of the process.

    Args:
        launcher: The function.
        distributed_type: Without effect: the strategy sees which devices there are.
        debug: Without effect.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher

    def __call__(self, index: int, *args: Any) -> None:
        with set_variables({"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"}):
            self.launcher(*args)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as a file of safetensors can hold it: contiguous, and tensors that share memory once.

    Args:
        state_dict: Tensors by name. Of names with the same tensor the first one stays; a warning lists the others.
    """
    tied = untie({name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)})
    left_out = {alias for aliases in tied.values() for alias in aliases}
    if left_out:
        logger.warning("removed %s from the state dict, which are other names of tensors in it", ", ".join(left_out))
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if name not in left_out
    }


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, those inside before those around them, and the model last.

    Args:
        model: The model.
        return_fqns: Whether to return pairs of name and module.
    """
    found = [*model.named_modules()][::-1]
    return found if return_fqns else [module for _, module in found]


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text."""
    return format_size(int(size))


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Write a tree of dicts into another one, and return it."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or getattr(named, "__name__", named))


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by a name with dots."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of the package tqdm, which only the first process of each machine shows.

    Args:
        args: Arguments of `tqdm`.
        main_process_only: Whether the other processes show none.
        kwargs: Arguments of `tqdm` by name.
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(*args, **kwargs)

"""Reading and setting environment variables, and facts of the machine, under accelerate's names."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from trainer_kit.accelerator.utils.other import patch_environment, str_to_bool
from trainer_kit.config import environment

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_gpu_info",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the truth value of an environment variable.

    Args:
        key: Name of the variable.
        default: Value without the variable.

    Raises:
        ValueError: If its text is no truth value.
    """
    return bool(str_to_bool(parse_choice_from_env(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return an environment variable, or `default` without it."""
    return environment.variable(key) or str(default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of several environment variables that is a number of at least 0, or `default`."""
    found = (environment.variable(key) or "" for key in env_keys)
    return next((int(text) for text in found if text.isdecimal()), default)


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Return the settings that a file of environment variables can hold, each as a line NAME=value."""
    return [f"{name}={value}\n" for name, value in current_env.items() if not set(f"{name}{value}") & set("\n;=<>&|")]


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables within a block, and bring them back after it."""
    with environment.cleared():
        yield


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the packages that have been imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the type of the machine's device and its name in DistributedType, such as ("cuda", "MULTI_GPU")."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if found is None else found.type
    return kind, {"cuda": "MULTI_GPU", "cpu": "MULTI_CPU"}.get(kind, f"MULTI_{kind.upper()}")


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the GPUs that torch finds, and their number."""
    names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return names, len(names)


def check_cuda_fp8_capability() -> bool:
    """Return whether the GPU computes in fp8: compute capability 8.9 or newer."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@dataclasses.dataclass
class CPUInformation:
    """The place of this process among those of the run.

    Attributes:
        rank: Number of the process.
        world_size: Number of all processes.
        local_rank: Number of the process on its machine.
        local_world_size: Number of processes on the machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the place of this process, as the launcher's environment says."""
    place = environment.place()
    return CPUInformation(place.rank, place.world_size, place.local_rank, place.local_world_size)

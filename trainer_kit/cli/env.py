"""Show what a bug report needs: versions, machine, devices and settings."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

from trainer_kit._version import __version__
from trainer_kit.config import environment
from trainer_kit.launch.config import LaunchConfig, default_path
from trainer_kit.utils.units import format_count, format_size

_PACKAGES = ("transformers", "safetensors", "numpy", "tensorboard", "torch_xla")

EXIT_CODES = {0: "shown"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing: the command has no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print one fact per line and return 0."""
    lines = facts()
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:{width}}  {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    """Return name and value of each fact, in output order."""
    import psutil

    return [
        ("trainer_kit", __version__),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        *_torch(),
        *((name, _version(name)) for name in _PACKAGES),
        ("system", platform.platform()),
        ("processors", f"{os.cpu_count()} ({platform.machine()})"),
        ("memory", format_size(psutil.virtual_memory().total)),
        *_devices(),
        ("xla", _xla()),
        *_saved_configuration(),
        *sorted(environment.settings().items()),
    ]


def _saved_configuration() -> list[tuple[str, str]]:
    """Return the saved configuration's fields that differ from their defaults."""
    path = default_path()
    try:
        saved = LaunchConfig.load(path).to_dict() if path.exists() else None
    except (OSError, TypeError, ValueError) as error:
        return [("configuration", str(error))]
    usual = LaunchConfig().to_dict()
    changed = [f"{name}={value}" for name, value in (saved or {}).items() if value != usual[name]]
    return [("configuration", "none saved" if saved is None else f"{path}: {' '.join(changed) or 'all defaults'}")]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> list[tuple[str, str]]:
    import torch

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = ", ".join(f"{name} {version}" for name, version in builds.items() if version)
    return [("torch", f"{torch.__version__} (built for {build or 'CPU'}, {torch.get_num_threads()} threads)")]


def _devices() -> list[tuple[str, str]]:
    import torch

    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = [
            (f"gpu {index}", f"{gpu.name}, {format_size(gpu.total_memory)}, capability {gpu.major}.{gpu.minor}")
            for index, gpu in enumerate(properties)
        ]
        return [*gpus, ("gpu driver", _driver())]
    if torch.backends.mps.is_available():
        return [("gpu 0", "Apple GPU (MPS), shares the machine's memory")]
    return [("gpu", "none that torch can use")]


def _xla() -> str:
    """Return the XLA devices that strategy "auto" would use, without starting XLA's runtime."""
    kind = environment.xla_device_type()
    if kind is None:
        return 'not taken by strategy "auto"'
    count = environment.xla_devices(kind)
    return f"{kind}, {format_count(count, 'device')}"


def _driver() -> str:
    """Return the version of the NVIDIA driver, which torch does not report."""
    try:
        import pynvml
    except ImportError:
        return "unknown; pip install nvidia-ml-py to see it"
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    return version

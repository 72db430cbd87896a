"""accelerate's modules and the names in them, wherever trainer_kit has them.

Scripts import names from the modules where accelerate defines them, or from those that happen to import them. Each
module of accelerate therefore exists here and finds every name: what there is, and what is refused in a sentence.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from trainer_kit.accelerator.unavailable import refusing

_ROOT = "trainer_kit.accelerator"

_HOMES = (
    "utils", "", "state", "logging", "tracking", "data_loader", "wrappers", "unavailable",
)  # fmt: skip
"""The modules that have names, in the order in which they are asked."""

_REAL = (
    "accelerator", "big_modeling", "checkpointing", "data_loader", "local_sgd", "logging", "state", "tracking",
    "utils.constants", "utils.dataclasses", "utils.environment", "utils.imports", "utils.memory", "utils.modeling",
    "utils.operations", "utils.other", "utils.random",
)  # fmt: skip
"""accelerate's modules that are files here."""

_OTHERS = (
    "hooks", "inference", "launchers", "memory_utils", "optimizer", "parallelism_config", "scheduler", "utils.ao",
    "utils.bnb", "utils.deepspeed", "utils.fsdp_utils", "utils.launch", "utils.megatron_lm", "utils.offload",
    "utils.torch_xla", "utils.tqdm", "utils.transformer_engine", "utils.versions",
)  # fmt: skip
"""Those whose names are elsewhere here, or refused."""

_COMMANDS = (
    "commands", "commands.accelerate_cli", "commands.config", "commands.config.config",
    "commands.config.config_args", "commands.config.default", "commands.env", "commands.estimate", "commands.launch",
    "commands.merge", "commands.test", "commands.to_fsdp2", "commands.tpu", "commands.utils", "test_utils",
    "test_utils.testing", "test_utils.training",
)  # fmt: skip
"""Those of programs and tests, whose names are all refused."""


def install() -> None:
    """Let each of accelerate's modules exist below `trainer_kit.accelerator` and find accelerate's names."""
    for name in _REAL:
        importlib.import_module(f"{_ROOT}.{name}").__getattr__ = functools.partial(find, name)  # type: ignore[method-assign]
    for name in (*_OTHERS, *_COMMANDS):
        module = ModuleType(f"{_ROOT}.{name}", f"Names of accelerate's {name}.")
        finds = _refuse_command if name in _COMMANDS else find
        module.__getattr__ = functools.partial(finds, name)  # type: ignore[method-assign]
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        if last not in dir(sys.modules[parent]):  # `utils.tqdm` is the function there
            setattr(sys.modules[parent], last, module)


def find(module: str, name: str) -> Any:
    """Return a name of accelerate.

    Args:
        module: The module in which it is looked for; "" for the package.
        name: The name.

    Raises:
        AttributeError: If accelerate has no such name.
    """
    if not name.startswith("_"):
        for home in _HOMES:
            there = importlib.import_module(_path(home))
            if name in (dir(there) if home == "utils" else there.__all__):
                return getattr(there, name)
    raise AttributeError(f"module '{_path(module)}' has no attribute {name!r}", name=name)


def _refuse_command(module: str, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module '{_path(module)}' has no attribute {name!r}", name=name)
    return refusing(name, "accelerate's commands and tests are not available; use the command `trainer-kit`")


def _path(module: str) -> str:
    return f"{_ROOT}.{module}" if module else _ROOT

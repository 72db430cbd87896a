"""accelerate's `utils`: configuration objects, operations on tensors, checks and helpers.

The names are those of the modules here, which are imported when a name is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = (
    "enums", "dataclasses", "operations", "memory", "modeling", "other", "random", "environment", "imports",
    "constants",
)  # fmt: skip
"""The modules whose names are found here."""


def __getattr__(name: str) -> Any:
    if name == "__all__":  # of `import *`
        return __dir__()
    homes = (*(f"{__name__}.{home}" for home in _HOMES), "trainer_kit.accelerator.unavailable")
    for home in () if name.startswith("__") else homes:
        module = importlib.import_module(home)
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({name for home in _HOMES for name in importlib.import_module(f"{__name__}.{home}").__all__})

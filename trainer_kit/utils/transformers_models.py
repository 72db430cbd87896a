"""Recognition of transformers models, without an import of transformers."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch


def is_transformers_model(model: torch.nn.Module) -> bool:
    """Return whether a model is a transformers model, whose `from_pretrained` reads config.json."""
    transformers = sys.modules.get("transformers.modeling_utils")  # imported already if the model is one
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def place_of_use_cache(model: torch.nn.Module) -> int | None:
    """Return the place of `use_cache` among a transformers model's parameters; None without it, or for other models."""
    if not is_transformers_model(model):
        return None
    names = [*inspect.signature(model.forward).parameters]
    return names.index("use_cache") if "use_cache" in names else None


def loaded_from(model: Any) -> str | None:
    """Return the name or folder that a model was loaded from, as transformers and diffusers keep it; None: unknown."""
    names = (getattr(model, "name_or_path", None), getattr(getattr(model, "config", None), "_name_or_path", None))
    return next((name for name in names if isinstance(name, str) and name), None)

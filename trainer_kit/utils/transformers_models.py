"""Recognition of transformers models, without an import of transformers."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_transformers_model(model: torch.nn.Module) -> bool:
    """Return whether a model is a transformers model, whose `from_pretrained` reads config.json."""
    transformers = sys.modules.get("transformers.modeling_utils")  # imported already if the model is one
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def loaded_from(model: Any) -> str | None:
    """Return the name or folder that a model was loaded from, as transformers and diffusers keep it; None: unknown."""
    names = (getattr(model, "name_or_path", None), getattr(getattr(model, "config", None), "_name_or_path", None))
    return next((name for name in names if isinstance(name, str) and name), None)

"""Recognition of transformers models, without an import of transformers."""

from __future__ import annotations

import sys

import torch


def is_transformers_model(model: torch.nn.Module) -> bool:
    """Return whether a model is a transformers model, whose `from_pretrained` reads config.json."""
    transformers = sys.modules.get("transformers.modeling_utils")  # imported already if the model is one
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)

"""Check whether transformers' `from_pretrained` can load a model's weights by the names in its `state_dict`."""

from __future__ import annotations

import copy
import json
import weakref
from typing import Any

import torch

from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.units import join_names
from trainer_kit.utils.wrappers import model_class

Shapes = dict[str, tuple[int, ...]]

_pristine: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, Shapes | None]] = weakref.WeakKeyDictionary()
"""By model: its configuration, and the shapes of the weights that its class creates from it."""


def has_own_format(model: torch.nn.Module) -> bool:
    """Return whether a model's `save_pretrained` writes more than configuration and weights (adapters)."""
    is_plain = is_transformers_model(model) and not getattr(model, "_hf_peft_config_loaded", False)
    return hasattr(model, "save_pretrained") and not is_plain


def why_not_pretrained(model: torch.nn.Module) -> str | None:
    """Return why `from_pretrained` could not load the model's weights.

    Names and shapes are compared with those of the model that the class creates from the configuration on the device
    "meta", as in `from_pretrained`. That model is created once for each configuration.

    Args:
        model: The model, without wrappers.

    Returns:
        The reason; None if the weights load, or the model has neither a configuration nor its own format.
    """
    kind = model_class(model).__name__
    if not is_transformers_model(model):
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            return f"{kind} is no transformers model, although it has the configuration of one"
        own = next((name for name in ("save_pretrained", "save") if callable(getattr(model, name, None))), None)
        return f"{kind} has a format of its own, which its {own} writes" if own else None
    expected = _expected(model)
    if expected is None:
        return None
    found = {name: tuple(each.shape) for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    missing = [name for name in expected if name not in found]
    foreign = [name for name in found if name not in expected]
    other = [name for name in expected if name in found and found[name] != expected[name]]
    for what, names in (
        ("its configuration has {}, which the model lacks", missing),
        ("the model has {}, which its configuration lacks", foreign),
        ("its configuration has another shape for {}", other),
    ):
        if names:
            return f"{kind} was changed after it was made: {what.format(join_names(map(repr, names)))}"
    return None


def _expected(model: torch.nn.Module) -> Shapes | None:
    """Return the shapes of the model that the class creates from the configuration alone; None if it cannot."""
    config: Any = model.config
    if getattr(config, "quantization_config", None) is not None:  # quantization replaces modules after creation
        return None
    content = json.dumps(config.to_dict(), default=str, sort_keys=True)
    known = _pristine.get(model)
    if known is None or known[0] != content:
        known = _pristine[model] = (content, _make(model_class(model), config))
    return known[1]


def _make(kind: Any, config: Any) -> Shapes | None:
    try:
        with generators_kept(torch.device("cpu")), torch.device("meta"):
            made = kind(copy.deepcopy(config))
    except Exception:  # the class may be the user's own; from_pretrained raises too
        return None
    return {name: tuple(each.shape) for name, each in made.state_dict().items() if isinstance(each, torch.Tensor)}

"""Whether transformers' `from_pretrained` loads a model's weights from the names that its `state_dict` has."""

from __future__ import annotations

import copy
import json
import sys
import weakref
from typing import Any

import torch

from trainer_kit.utils.rng import generators_kept

Shapes = dict[str, tuple[int, ...]]

_pristine: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, Shapes | None]] = weakref.WeakKeyDictionary()
"""By model: its configuration, and the shapes of the weights that its class makes from that."""


def is_transformers_model(model: torch.nn.Module) -> bool:
    """Whether a model is of a class of transformers, whose `from_pretrained` reads config.json."""
    transformers = sys.modules.get("transformers.modeling_utils")  # a model of such a class has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def has_own_format(model: torch.nn.Module) -> bool:
    """Whether a model has a `save_pretrained` that keeps more than its configuration and weights (adapters)."""
    is_plain = is_transformers_model(model) and not getattr(model, "_hf_peft_config_loaded", False)
    return hasattr(model, "save_pretrained") and not is_plain


def why_not_pretrained(model: torch.nn.Module) -> str | None:
    """Say why `from_pretrained` would make random weights from a folder with the model's configuration.

    Names and shapes are compared with those of the model that the class makes from the configuration on the device
    "meta", as `from_pretrained` does. It is made once for each configuration.

    Args:
        model: Without wrappers.

    Returns:
        The reason; None where the weights load, or where there is no configuration and no format of the model's own.
    """
    kind = type(model).__name__
    if not is_transformers_model(model):
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            return f"{kind} is no transformers model, although it has the configuration of one"
        own = next((name for name in ("save_pretrained", "save") if hasattr(model, name)), None)
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
        ("{} has another shape in its configuration", other),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"{kind} was changed after it was made: {what.format(repr(names[0]) + more)}"
    return None


def _expected(model: torch.nn.Module) -> Shapes | None:
    """The shapes of what the class makes from the configuration; None where it cannot be made from that alone."""
    config: Any = model.config
    if getattr(config, "quantization_config", None) is not None:  # replaces modules once the class has made them
        return None
    content = json.dumps(config.to_dict(), default=str, sort_keys=True)
    known = _pristine.get(model)
    if known is None or known[0] != content:
        known = _pristine[model] = (content, _make(type(model), config))
    return known[1]


def _make(kind: Any, config: Any) -> Shapes | None:
    try:
        with generators_kept(torch.device("cpu")), torch.device("meta"):
            made = kind(copy.deepcopy(config))
    except Exception:  # the class may be the user's own; from_pretrained raises the same
        return None
    return {name: tuple(each.shape) for name, each in made.state_dict().items() if isinstance(each, torch.Tensor)}

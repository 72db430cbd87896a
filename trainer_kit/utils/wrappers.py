"""What wraps a model: modules that prefix the names of its weights, and classes that torch derives from its own."""

from __future__ import annotations

import torch


def without_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers of `torch.compile`, DataParallel and DistributedDataParallel.

    Args:
        model: A model with any number of wrappers, or none.
    """
    while True:
        children = dict(model.named_children())
        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        elif children.keys() == {"_orig_mod"}:  # torch's OptimizedModule, which is slow to import
            model = children["_orig_mod"]
        else:
            return model


def without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model below the adapters of a peft model, and any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def without_wrappers_and_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of wrappers and below adapters, such as the one of transformers that has a `config`."""
    return without_adapters(without_wrappers(model))


def model_class(model: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a model, not the one that torch's `fully_shard` derives from it."""
    kind = type(model)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)]

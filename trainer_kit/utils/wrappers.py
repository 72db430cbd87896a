"""Modules that wrap a model and put a prefix before the names of its weights."""

from __future__ import annotations

import torch


def without_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """The model in what `torch.compile`, DataParallel and DistributedDataParallel return, whose weights are the same.

    Args:
        model: Wrapped any number of times, or not at all.
    """
    while True:
        children = dict(model.named_children())
        if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        elif children.keys() == {"_orig_mod"}:  # torch's OptimizedModule, whose import takes seconds
            model = children["_orig_mod"]
        else:
            return model

"""Parameters of lazy modules, which have no shape until the model was called."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from trainer_kit.utils.wrappers import model_class


def check_shapes(model: torch.nn.Module) -> None:
    """Check that all parameters and buffers of a model have shapes.

    Raises:
        ValueError: If one belongs to a lazy module, such as `LazyLinear`, that was not called yet.
    """
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if is_lazy(tensor):
                raise ValueError(
                    f"{name!r} of this {model_class(model).__name__} belongs to a lazy module and has no shape yet; "
                    "call the model once with a batch before Trainer(...)"
                )

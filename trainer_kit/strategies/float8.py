"""Linear layers that compute in 8-bit floating point, by torchao."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from trainer_kit.utils.hidden_matrices import hidden_matrices
from trainer_kit.utils.wrappers import model_class

_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs that multiply in 8-bit floating point."""

_MULTIPLE = 16
"""Kernels need dimensions that are multiples of it."""


def check_device(device: torch.device) -> None:
    """Check that a device computes in 8-bit floating point.

    Raises:
        ValueError: If it does not.
    """
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < _CAPABILITY:
        name = device.type if found is None else f"a GPU of {found[0]}.{found[1]}"
        raise ValueError(
            "mixed_precision='fp8' needs an NVIDIA GPU of compute capability 8.9 or later, and this run uses "
            f"{name}; use 'bf16'"
        )


def package() -> Any:
    """Return torchao's module of 8-bit floating point.

    Raises:
        ImportError: If torchao cannot be imported.
    """
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ImportError(f"mixed_precision='fp8' needs torchao ({error}); run `pip install torchao`") from error


def convert_linear_layers(model: torch.nn.Module, emulate: bool = False) -> None:
    """Replace a model's hidden linear layers by torchao's, in place; parameters and their names stay.

    Layers stay that are embeddings or the head, derive from `torch.nn.Linear`, or have a dimension that is no multiple
    of 16. Layers that are converted already stay too.

    Args:
        model: The model, on its device.
        emulate: Whether other devices compute the products in float32, from values that are rounded to 8 bits.

    Raises:
        ValueError: If no layer can be converted.
    """
    float8 = package()
    matrices = hidden_matrices(model)

    def is_convertible(module: torch.nn.Module, name: str = "") -> bool:
        return (
            type(module) is torch.nn.Linear
            and module.weight in matrices
            and all(size % _MULTIPLE == 0 for size in module.weight.shape)
        )

    layers = [*model.modules()]
    if any(map(is_convertible, layers)):
        config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=is_convertible)
    elif not any(type(layer).__name__ == "Float8Linear" for layer in layers):
        raise ValueError(
            f"mixed_precision='fp8' computes hidden linear layers whose dimensions are multiples of {_MULTIPLE}, and "
            f"{model_class(model).__name__} has none; use 'bf16'"
        )

"""What XLA needs of a model and its process: tied parameters, other dtypes, masks that are traced, threads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

DOWNCAST = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
"""What XLA_DOWNCAST_BF16 stood for: float to bfloat16, double to float32."""


def names_by_parameter(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """All names of each parameter; tied ones have several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def tie_again(model: torch.nn.Module, groups: Iterable[list[str]]) -> None:
    """Makes parameters one again that were moved one by one."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            place, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(place), attribute, parameter)


def downcast_module(model: torch.nn.Module) -> torch.nn.Module:
    """Casts a model's parameters and buffers in place."""
    casted: torch.nn.Module = model._apply(lambda tensor: tensor.to(DOWNCAST.get(tensor.dtype, tensor.dtype)))
    return casted


def let_transformers_trace() -> None:
    """Tells transformers that what happens to XLA's tensors is traced.

    In other cases its models read in each forward pass whether the mask of a batch leaves anything out, for which the
    loop would wait for the device, and go another way where it does not, which would be a graph of its own.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    known = getattr(masking, "is_tracing", None)
    if known is None or hasattr(known, "of_xla"):
        return

    def is_tracing(tensor: Any = None) -> bool:
        return known(tensor) or (isinstance(tensor, torch.Tensor) and tensor.device.type == "xla")

    is_tracing.of_xla = True  # type: ignore[attr-defined]
    masking.is_tracing = is_tracing


def renew_threads() -> None:
    """Makes torch's pool of threads, which a forked process does when it first needs one.

    The threads of XLA's backward() would do so all at once, and end the process.
    """
    torch.set_num_threads(torch.get_num_threads())

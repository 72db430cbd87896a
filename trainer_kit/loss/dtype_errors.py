"""Explanations of torch's dtype errors for a batch, a model and its loss."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from trainer_kit.utils.wrappers import model_class

_INPUTS = r"must have the same dtype|should be the same|mixed dtype|does not match weight dtype"
_WHOLE = r"expected (target dtype to be|scalar type) Long"
_WHOLE_TYPES = r"\b([Ll]ong|[Ii]nt|[Ss]hort|Byte|Char|[Bb]ool|(un)?signed char)\b|all inputs must share"
_FLOATS = r"can't be cast to the desired output type Long|Found dtype Long but expected"


def explain_dtypes(
    error: Exception, columns: Mapping[str, torch.dtype], labels: torch.dtype | None, module: torch.nn.Module
) -> str | None:
    """Explain a dtype error of a model's forward pass or loss, with a remedy.

    Args:
        error: The error raised by torch.
        columns: The dtypes of the batch's tensors without the labels, by name.
        labels: The dtype of the labels; None without labels.
        module: The model.

    Returns:
        The message; None if `error` is not a dtype error that this function knows.
    """
    text, name = str(error), model_class(module).__name__
    if labels is not None and labels.is_floating_point and re.search(_WHOLE, text):
        return (
            f"the labels are {_named(labels)}, but the loss of {name} takes whole numbers (classes); give them as "
            "torch.int64, or for a regression use a loss such as mse_loss"
        )
    if labels is not None and not labels.is_floating_point and re.search(_FLOATS, text):
        return (
            f"the labels are {_named(labels)}, but the loss of {name} takes floating-point numbers; give labels.float()"
        )
    weights = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    is_of_whole = re.search(_WHOLE_TYPES, text) is not None  # else columns of tokens have no part in it
    others = {
        column: dtype
        for column, dtype in columns.items()
        if dtype not in weights and (dtype.is_floating_point or is_of_whole)
    }
    if len(weights) != 1 or not others or not re.search(_INPUTS, text):
        return None
    (weight,) = weights
    given = ", ".join(f"{column} ({_named(dtype)})" for column, dtype in others.items())
    modes = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    remedy = "convert one of them"
    if weight in modes:
        remedy = (
            f"load the model in float32 and set mixed_precision={modes[weight]!r}, or convert them in data_collator"
        )
    return f"the weights of {name} are {_named(weight)}, but the batch holds {given}; {remedy}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Parameter groups whose learning rate decreases from the head of a model to its input."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer_kit.utils.repeated_blocks import repeated_blocks
from trainer_kit.utils.wrappers import model_class, without_wrappers


def decay_by_layer(model: nn.Module, groups: list[dict[str, Any]], rate: float, decay: float) -> list[dict[str, Any]]:
    """Divide parameter groups by layer, each with the learning rate of its layer.

    A layer is a block that the model repeats. What the model defines before the first block (the embeddings) lies below
    it, and what it defines after the last one (the head) above. The head has `rate`, and each layer `decay` times the
    learning rate of the next one.

    Args:
        model: The model.
        groups: Groups, whose "params" are (name, parameter) pairs.
        rate: Learning rate of the head.
        decay: Factor from one layer to the one below.

    Returns:
        The groups with "lr", from the head to the embeddings.

    Raises:
        ValueError: If the model repeats no block.
    """
    layers, top = _layers(without_wrappers(model))
    if top == 1:
        raise ValueError(
            f"layer_lr_decay={decay} needs a model that repeats a block (a ModuleList or Sequential of one class), and "
            f"{model_class(model).__name__} repeats none; set it to 1.0"
        )
    divided = [
        {
            **group,
            "params": [pair for pair in group["params"] if layers[pair[1]] == layer],
            "lr": rate * decay ** (top - layer),
        }
        for layer in range(top, -1, -1)
        for group in groups
    ]
    return [group for group in divided if group["params"]]


def _layers(model: nn.Module) -> tuple[dict[nn.Parameter, int], int]:
    """Return the layer of each parameter, from 0, and that of the head."""
    blocks = [*repeated_blocks(model)]
    in_block = {parameter: number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    layers: dict[nn.Parameter, int] = {}
    current, last = 0, [*in_block][-1] if in_block else None
    for parameter in model.parameters():
        current = in_block.get(parameter, current)
        layers[parameter] = current
        if parameter is last:
            current = len(blocks) + 1
    return layers, len(blocks) + 1

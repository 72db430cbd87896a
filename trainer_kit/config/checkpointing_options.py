"""`CheckpointingOptions`: the options of `TrainingArguments.gradient_checkpointing`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from trainer_kit.config.validation import Rule, check_values

Patterns = Annotated[
    list[str], Rule("a list of patterns of module names or class names", lambda value: bool(value) and all(value))
]


@dataclasses.dataclass
class CheckpointingOptions:
    """Which modules recompute their activations in the backward pass, and which activations.

    Args:
        modules: Patterns (`fnmatch`) of the names or class names of modules; of those that match, the outermost
            recompute. None: the blocks that the model repeats.
        every: Only the first of each `every` such modules recomputes.
        policy: "all" recomputes all activations. "save_matmuls" keeps the results of matrix products (without a batch
            dimension), convolutions and fused attention, and recomputes the others.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not allowed.
    """

    modules: Patterns | None = None
    every: Annotated[int, Rule("a whole number of at least 1", lambda value: value >= 1)] = 1
    policy: Literal["all", "save_matmuls"] = "all"

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def are_default(self) -> bool:
        """Whether a model's own activation checkpointing does the same."""
        return self == CheckpointingOptions()

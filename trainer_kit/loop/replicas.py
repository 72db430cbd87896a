"""A check that all processes train the same weights."""

from __future__ import annotations

import torch

from trainer_kit.run import Run
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.vectors import as_bytes

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers by their bytes."""


def warn_of_different_replicas(run: Run) -> None:
    """Warn of parameters that differ between the processes. Collective.

    A strategy gives all processes the same weights, and they stay equal, because all take the same steps. A layer that
    sets its weights in its first forward pass, or a callback that draws some, gives each process its own.

    Args:
        run: The run, after its second step.
    """
    strategy = run.strategy
    if strategy.collectives.is_alone or strategy.sharding.is_active or strategy.static_shapes:
        return
    named = {name: each for name, each in run.model.named_parameters() if each.requires_grad}
    digests = _digests([*named.values()])
    own = hash((len(named), *digests)) % 2**20  # a sum of squares of many must stay below 2**63
    processes, total, squares = strategy.collectives.all_reduce_ints([1, own, own**2])
    if squares * processes == total**2:
        return
    found = strategy.collectives.gather_object(dict(zip(named, digests, strict=True)))
    names = dict.fromkeys(name for each in found for name in each)
    different = [name for name in names if len({each.get(name) for each in found}) > 1]
    if strategy.is_main:
        warn(
            f"the processes train different weights: {join_names(different)} differ after two steps; something "
            "set them in each process on its own, such as a layer in its first forward pass or a callback; set them "
            "before the training, or by the same seed and data in all processes"
        )


def _digests(tensors: list[torch.Tensor]) -> list[int]:
    """Return the sum of each tensor's elements as whole numbers; waits for the device once."""
    sums = [as_bytes(each).view(_WHOLE[min(8, each.element_size())]).sum() for each in tensors]
    return torch.stack(sums).tolist() if sums else []

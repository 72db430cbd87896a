"""`Replicas`: a check that all processes train the same weights."""

from __future__ import annotations

import torch

from trainer_kit.run import Run
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.vectors import as_bytes


class Replicas:
    """The weights of a run, of which each process has a copy.

    A strategy gives all processes the same weights, and they stay equal, because all take the same steps. A layer that
    sets its weights in its first forward pass, or a callback that draws some, gives each process its own.

    Args:
        run: The run; its model is prepared.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._has_warned = False

    def warn_if_different(self) -> None:
        """Warn once of trainable parameters that differ between the processes. Collective.

        Waits for the device once.
        """
        run, strategy = self.run, self.run.strategy
        collectives = strategy.collectives
        if collectives.is_alone or strategy.sharding.is_active or strategy.static_shapes:
            return
        left_out = getattr(run.model, "_ddp_params_and_buffers_to_ignore", ())  # torch's name
        named = {
            name: each.detach()
            for name, each in run.model.named_parameters()
            if each.requires_grad and name not in left_out and type(each.detach()) is torch.Tensor
        }
        digests = _digests([*named.values()])
        if len({*collectives.gather_object(hash((len(digests), *digests)))}) == 1:
            return
        found = collectives.gather_object(dict(zip(named, digests, strict=True)))
        if strategy.is_main and not self._has_warned:
            self._has_warned = True
            names = dict.fromkeys(name for each in found for name in each)
            different = [name for name in names if len({each.get(name) for each in found}) > 1]
            warn(
                f"the processes train different weights: {join_names(different)} differ at step {run.state.step}, and "
                "checkpoints hold those of the main process; something sets them in each process on its own, such as a "
                "layer in its first forward pass or a callback, or unlike processors round differently; set them "
                "before the training, or by the same seed and data in all processes"
            )


def _digests(tensors: list[torch.Tensor]) -> list[int]:
    """Return the sum of each tensor's content as whole numbers; waits for the device once."""
    sums = [_sum(tensor).to(tensors[0].device) for tensor in tensors]
    found: list[int] = torch.stack(sums).tolist() if sums else []
    return found


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes by eight, as int64, which needs no copy, and of the bytes left."""
    content = as_bytes(tensor)
    content = content.clone() if content.storage_offset() % 8 else content
    whole = len(content) // 8 * 8
    return content[:whole].view(torch.int64).sum() + content[whole:].sum()

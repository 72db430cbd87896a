"""Factors of learning rates that packages leave in an optimizer's groups for schedules of their own."""

from __future__ import annotations

import torch

from trainer_kit.utils.user_warnings import warn


def warn_of_rate_scales(optimizer: torch.optim.Optimizer) -> None:
    """Warn if groups have different "lr_scale" and the same "lr": timm's schedules multiply them, no others do."""
    groups = [group for group in optimizer.param_groups if "lr_scale" in group]
    rates, scales = {float(group["lr"]) for group in groups}, sorted({group["lr_scale"] for group in groups})
    if len(scales) > 1 and len(rates) == 1 and rates != {0.0}:
        warn(
            f"the optimizer's groups have an 'lr_scale' from {scales[0]:.3g} to {scales[-1]:.3g}, which only timm's "
            "schedules apply, so that all learn at the same rate here; set group['lr'] *= group['lr_scale'], or use "
            "TrainingArguments(layer_lr_decay=) in place of optimizer="
        )

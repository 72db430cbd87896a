"""Steps at which a start of the script saves and is killed, chosen by a seed for repeatability."""

from __future__ import annotations

import dataclasses
import random

MOMENTS = {
    "on_step_begin": "before its forward pass",
    "on_pre_optimizer_step": "before its optimizer step",
    "on_optimizer_step": "after its optimizer step",
    "on_step_end": "at its end",
}
"""Descriptions of the moments of a step in which a start may be killed, by hook."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """Point at which a start is killed.

    Attributes:
        step: The step in progress.
        moment: One of `MOMENTS`.
        rank: Rank of the process.
    """

    step: int
    moment: str
    rank: int


def checkpoint_step(seed: int, steps: int) -> int:
    """Choose the step of the checkpoint, in the first half, to leave steps to compare after the resume.

    Args:
        seed: Seed of the choice.
        steps: Last step.
    """
    return random.Random(f"checkpoint {seed}").randint(1, max(1, steps // 2))


def choose_kill(seed: int, save_at: int, steps: int, processes: int) -> Kill:
    """Choose a point after the checkpoint at which a start is killed.

    Args:
        seed: Seed of the choice.
        save_at: Step of the checkpoint.
        steps: Last step, greater than `save_at`.
        processes: Number of processes.
    """
    chance = random.Random(f"kill {seed}")
    return Kill(chance.randint(save_at + 1, steps), chance.choice([*MOMENTS]), chance.randrange(processes))

"""Where a start of the script saves and where it is killed: chosen by a seed, so that it can be done again."""

from __future__ import annotations

import dataclasses
import random

MOMENTS = {
    "on_step_begin": "before its forward pass",
    "on_pre_optimizer_step": "before its optimizer step",
    "on_optimizer_step": "after its optimizer step",
    "on_step_end": "at its end",
}
"""The moments of a step in which a start may be killed, and what they are called."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """Where a start is killed.

    Attributes:
        step: The step under way.
        moment: One of `MOMENTS`.
        rank: The process.
    """

    step: int
    moment: str
    rank: int


def checkpoint_step(seed: int, steps: int) -> int:
    """The step of the checkpoint, in the first half: the steps after it are what is compared after the resume."""
    return random.Random(f"checkpoint {seed}").randint(1, max(1, steps // 2))


def choose_kill(seed: int, save_at: int, steps: int, processes: int) -> Kill:
    """Anywhere after the checkpoint; `steps` is greater than `save_at`."""
    chance = random.Random(f"kill {seed}")
    return Kill(chance.randint(save_at + 1, steps), chance.choice([*MOMENTS]), chance.randrange(processes))

"""`run_script`: runs a user's script in this process, with its training taken over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trainer_kit.launch.script import run_as_main
from trainer_kit.trainer import Trainer, TrainOutput

Train = Callable[[bool | str | Path | None], TrainOutput]
"""The Trainer's own `train`, bound to it; its argument is `resume_from_checkpoint`."""


class TakeOver(Protocol):
    """What a tool does in place of `Trainer.train`."""

    def __call__(self, trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> TrainOutput:
        """Takes over one call of `train`.

        Args:
            trainer: The user's Trainer.
            train: Trains it as if nothing had been taken over.
            resume_from_checkpoint: What the script asked for.

        Returns:
            What the script gets; a tool that has seen enough raises SystemExit instead.
        """


def run_script(words: Sequence[str], take_over: TakeOver) -> None:
    """Runs a script, or a module, as the main program, and calls `take_over` where it calls `Trainer.train`.

    The method is replaced for good, on the class: the process belongs to the tool.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        take_over: Called with the Trainer, its own `train` and what the script wanted to resume from.

    Raises:
        SystemExit: The script's own, or that of `take_over`.
        BaseException: What the script raises.
    """
    train = Trainer.train

    @functools.wraps(train)
    def taken(self: Trainer, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        return take_over(self, functools.partial(train, self), resume_from_checkpoint)

    Trainer.train = taken  # type: ignore[method-assign]
    run_as_main([*words])

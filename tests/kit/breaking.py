"""A callback that makes a step fail."""

from __future__ import annotations

from trainer_kit import Callback, Run


class BreaksAt(Callback):
    """Makes a gradient of the step after a number of steps NaN, once."""

    def __init__(self, step: int) -> None:
        self.step, self.has_broken = step, False

    def on_pre_optimizer_step(self, run: Run) -> None:
        if run.state.step == self.step and not self.has_broken:
            self.has_broken = True
            next(run.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

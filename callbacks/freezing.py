"""`Freezing`: freezes parameters for a part of the training."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.callback import Callback
from trainer_kit.utils.units import join_names

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")


class Freezing(Callback):
    """Freeze the parameters whose names match, and unfreeze them on schedule.

    Parameters are frozen once `from_step` steps are taken, until `until_step` steps or `until_epoch` epochs are taken,
    whichever comes first. The schedule depends only on steps and epochs, so a resumed run continues it. Use several of
    these callbacks for other schedules. Parameters that require no gradient from the start stay frozen. A frozen batch
    norm still updates its running statistics, which are not parameters.

    Args:
        patterns: Shell patterns of parameter names: `["encoder.*", "*.bias"]`.
        until_step: Optimizer steps after which the parameters are trained; None: no limit.
        until_epoch: Whole epochs after which the parameters are trained; None: no limit.
        from_step: Optimizer steps after which the parameters are frozen.

    Raises:
        ValueError: If the patterns are empty or the schedule is not valid; in training, if a pattern matches no
            parameter, or every parameter would be frozen.
    """

    priority = -100

    def __init__(
        self,
        patterns: str | Iterable[str],
        until_step: int | None = None,
        until_epoch: int | None = None,
        from_step: int = 0,
    ) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        if not self.patterns:
            raise ValueError("Freezing(patterns=[]) freezes nothing; give patterns of parameter names")
        if until_step is not None and until_step <= from_step:
            raise ValueError(f"Freezing(until_step={until_step!r}) must be greater than from_step={from_step!r}")
        if until_epoch is not None and until_epoch < 1:
            raise ValueError(f"Freezing(until_epoch={until_epoch!r}) must be a whole number of at least 1")
        self.until_step = until_step
        self.until_epoch = until_epoch
        self.from_step = from_step
        self._parameters: list[torch.nn.Parameter] = []
        self._frozen = False

    def on_train_begin(self, run: Run) -> None:
        self._set(False)
        named = dict(run.model.named_parameters())
        matched: dict[str, torch.nn.Parameter] = {}
        for pattern in self.patterns:
            names = fnmatch.filter(named, pattern)
            if not names:
                known = join_names(map(repr, named), most=8)
                raise ValueError(f"Freezing: {pattern!r} matches no parameter of the model; it has {known}")
            matched.update((name, named[name]) for name in names if named[name].requires_grad)
        self._parameters = list(matched.values())
        self._set(self._is_due(run))
        if self._frozen and not any(parameter.requires_grad for parameter in named.values()):
            raise ValueError(f"Freezing: {self.patterns} freezes every parameter; leave some to train")

    def on_step_begin(self, run: Run) -> None:
        due = self._is_due(run)
        if due != self._frozen:
            self._set(due)
            text = "froze %d parameters after step %d" if due else "unfroze %d parameters after step %d"
            _logger.info(text, len(self._parameters), run.state.step)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._set(False)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._set(False)

    def _is_due(self, run: Run) -> bool:
        step, epoch = run.state.step, run.state.epoch
        return (
            step >= self.from_step
            and (self.until_step is None or step < self.until_step)
            and (self.until_epoch is None or epoch < self.until_epoch)
        )

    def _set(self, frozen: bool) -> None:
        if frozen == self._frozen:
            return
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None  # else the optimizer would keep using the last gradient
        self._frozen = frozen

"""`SlowProcesses`: names the process that all others wait for."""

from __future__ import annotations

import logging
import math
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_kit.callback import Callback
from trainer_kit.profiling.time_ledger import DOWN, LOST
from trainer_kit.utils.units import format_duration

if TYPE_CHECKING:
    from trainer_kit.run import Run

logger = logging.getLogger("trainer_kit")

_WARNS_FROM = 1.3
_LEAST_STEPS = 100
_LEAST_SHARE = 0.05
"""Share of a step that the others must wait for a process before it is named."""

_BETWEEN_STEPS = frozenset({"setup", "evaluation", "saving", "logging", LOST, DOWN})
"""Activities that are no part of a step."""

_WAITING = _BETWEEN_STEPS | {"backward", "optimizer", "loop"}
"""Activities that are no part of a step, or in which a process waits for others."""


class _Pace(NamedTuple):
    """A process's seconds a step, by activity that depends on itself alone, and those of whole steps."""

    host: str
    by_activity: dict[str, float]
    step: float

    @property
    def own(self) -> float:
        return sum(self.by_activity.values())


class SlowProcesses(Callback):
    """Name the slowest process of a run, for which all others wait in each step.

    At a record, at least 100 steps after the last comparison, the processes compare the time that each spends on data,
    forward passes and callbacks. There, no process waits for another, unless weights are sharded: then forward passes
    are left out. The comparison adds to the record:

    - `slowest_rank` (rank): Rank of the slowest process.
    - `slowest_ratio` (ratio, at least 1): Its time divided by the median process's.

    From a ratio of 1.3 on, if the others wait for more than 5 % of each step, a warning names the process, and again
    after twice as many steps. A slow network, and a GPU that is slow in the backward pass alone, are not seen.

    Args:
        replace_from: Ratio from which the slow machine leaves the run for one that waits to join it, see
            `trainer-kit launch --num-nodes MIN:MAX`; None: never.

    Raises:
        ValueError: If `replace_from` is not above 1.
    """

    priority = 110

    def __init__(self, replace_from: float | None = None) -> None:
        is_ratio = isinstance(replace_from, (int, float)) and 1 < replace_from < math.inf
        if replace_from is not None and not is_ratio:
            raise ValueError(f"replace_from={replace_from!r} must be a ratio above 1, such as 1.3")
        self.replace_from = replace_from
        self._step = 0  # at the last comparison
        self._seconds: dict[str, float] = {}
        self._next_warning = 0
        self._patience = 2 * _LEAST_STEPS  # steps from the next warning to the one after it

    def on_train_begin(self, run: Run) -> None:
        self._begin(run)
        self._next_warning, self._patience = 0, 2 * _LEAST_STEPS

    def on_regroup(self, run: Run) -> None:
        self._begin(run)

    def metrics(self, run: Run) -> dict[str, Any]:
        steps, collectives = run.state.step - self._step, run.strategy.collectives
        if collectives.is_alone or 0 <= steps < _LEAST_STEPS:
            return {}
        paces = collectives.gather_object(self._pace(run, steps)) if steps > 0 else []  # fewer after a rollback
        self._begin(run)
        if not paces:
            return {}
        by_time = sorted(range(len(paces)), key=lambda rank: paces[rank].own)
        rank, usual = by_time[-1], paces[by_time[(len(paces) - 1) // 2]]
        slowest = paces[rank]
        if usual.own <= 0:
            return {}
        ratio = slowest.own / usual.own
        if slowest.own - usual.own >= _LEAST_SHARE * slowest.step:
            if ratio >= _WARNS_FROM and run.state.step >= self._next_warning:
                self._warn(run, rank, slowest, usual, steps)
            if self.replace_from is not None and ratio >= self.replace_from and rank == collectives.rank:
                run.strategy.session.ask_for_replacement()
        return {"slowest_rank": rank, "slowest_ratio": ratio}

    def _begin(self, run: Run) -> None:
        self._step, self._seconds = run.state.step, run.ledger.seconds()

    def _pace(self, run: Run, steps: int) -> _Pace:
        passed = {name: value - self._seconds.get(name, 0.0) for name, value in run.ledger.seconds().items()}
        waits = _WAITING | {"forward"} if run.strategy.sharding.is_active else _WAITING
        own = {name: value / steps for name, value in passed.items() if name not in waits}
        in_steps = sum(value for name, value in passed.items() if name not in _BETWEEN_STEPS)
        return _Pace(socket.gethostname(), own, in_steps / steps)

    def _warn(self, run: Run, rank: int, slowest: _Pace, usual: _Pace, steps: int) -> None:
        self._next_warning = run.state.step + self._patience
        self._patience *= 2
        if not run.strategy.is_main:
            return
        excess = {name: value - usual.by_activity.get(name, 0.0) for name, value in slowest.by_activity.items()}
        logger.warning(
            "rank %d on %s takes %.1f times as long for its own part of a step as the median process (%s instead of "
            "%s, mostly for %s, over %d steps), and all others wait for it",
            rank, slowest.host, slowest.own / usual.own, format_duration(slowest.own), format_duration(usual.own),
            max(excess, key=lambda name: excess[name]), steps,
        )  # fmt: skip

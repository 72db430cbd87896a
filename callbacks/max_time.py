"""`MaxTime`: ends training after a time."""

from __future__ import annotations

import datetime
import math
import time
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class MaxTime(Callback):
    """End training after the step in which a time has passed; a last checkpoint is saved as usual.

    The time is that of the training, evaluations included. A resume counts on from its checkpoint.

    Args:
        limit: The time: a `datetime.timedelta`, or minutes.

    Raises:
        TypeError: If the limit is neither.
        ValueError: If the limit is not above 0.
    """

    def __init__(self, limit: datetime.timedelta | float) -> None:
        if not isinstance(limit, (datetime.timedelta, int, float)):
            raise TypeError(f"MaxTime({limit!r}): give a datetime.timedelta, such as timedelta(hours=12), or minutes")
        self.seconds = limit.total_seconds() if isinstance(limit, datetime.timedelta) else 60.0 * limit
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"MaxTime({limit!r}) must be a time above 0: a timedelta, or minutes")
        self._earlier = 0.0  # seconds before the last start
        self._begin: float | None = None  # by the monotonic clock; None outside of training

    @property
    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self._earlier + (0.0 if self._begin is None else time.monotonic() - self._begin)

    def on_train_begin(self, run: Run) -> None:
        self._begin = time.monotonic()
        self._check(run)

    def on_step_end(self, run: Run) -> None:
        self._check(run)

    def on_exit(self, run: Run) -> None:
        self._earlier, self._begin = self.elapsed, None

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = state_dict["elapsed"]
        self._begin = None if self._begin is None else time.monotonic()  # in a training that continues

    def _check(self, run: Run) -> None:
        if self.elapsed >= self.seconds and not run.requests.stop:
            run.requests.stop, run.requests.reason = True, f"MaxTime: {self.seconds:g} seconds are over"

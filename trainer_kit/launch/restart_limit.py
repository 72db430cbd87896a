"""`RestartLimit`: how many failures a run survives, and `FailureHistory`, which counts them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer_kit.utils.units import format_duration

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(rf"(\d+)(?:\s*/\s*(\d*)\s*({'|'.join(_UNITS)}))?")


class RestartLimit(NamedTuple):
    """Number of failures after which a run is still restarted.

    Attributes:
        failures: Number of failures.
        seconds: Time in which they are counted; None for the whole run.
    """

    failures: int
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> RestartLimit:
        """Read 3, "3" or "5/1h": a count, and a time in s, m (or min), h or d.

        Raises:
            ValueError: If the value has another form.
        """
        match = _PATTERN.fullmatch(str(value).strip())
        count, number, unit = match.groups() if match else ("", "", "")
        if not match or number == "0" or (unit and count == "0"):
            raise ValueError(
                f"max_restarts={value!r} is not allowed; give a whole number of at least 0, or failures within a time, "
                "such as 5/1h (units s, m, h, d)"
            )
        return cls(int(count), float(number or 1) * _UNITS[unit] if unit else None)

    def __str__(self) -> str:
        return str(self.failures) if self.seconds is None else f"{self.failures} within {format_duration(self.seconds)}"


class FailureHistory:
    """Times of a run's failures.

    Args:
        limit: Failures that are allowed.
        clock: Returns the time in seconds.
    """

    def __init__(self, limit: RestartLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._times: list[float] = []

    def record(self) -> None:
        """Count a failure that happens now."""
        self._times.append(self._clock())

    def ages(self) -> list[float]:
        """Return the seconds since each counted failure, the oldest first."""
        now, seconds = self._clock(), self.limit.seconds
        return [now - then for then in self._times if seconds is None or now - then < seconds]

    def merge(self, histories: Sequence[Sequence[float]]) -> None:
        """Take the longest of several machines' histories, since a machine that joined later has missed failures.

        Args:
            histories: The ages of each machine.
        """
        now = self._clock()
        self._times = [now - age for age in max([self.ages(), *histories], key=len)]

    def decide(self, step: int | None, step_at_start: int | None) -> tuple[bool, str]:
        """Decide whether to restart after one more failure.

        It is allowed within the limit; beyond, if no time belongs to the limit, while the run makes progress.

        Args:
            step: Step of the newest checkpoint; None if there is none.
            step_at_start: The same when the processes were started.

        Returns:
            Whether to restart, and what is to be said about it.
        """
        number, limit = self.count + 1, self.limit
        where = "" if step is None else f", from the checkpoint of step {step}"
        if number <= limit.failures:
            return True, f"restart {number} of {limit}{where}"
        if limit.seconds is not None:
            return False, f"this is failure {number}, and --max-restarts allows {limit}"
        if step is None or (step_at_start is not None and step <= step_at_start):
            since = "written" if step is None else f"newer than that of step {step}"
            return False, f"{number - 1} restarts are made, and no checkpoint is {since} since the last"
        return True, f"restart {number}, more than max_restarts={limit}, since there is a newer checkpoint{where}"

    @property
    def count(self) -> int:
        """Number of failures that count now."""
        return len(self.ages())

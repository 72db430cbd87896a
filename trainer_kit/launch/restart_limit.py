"""`RestartLimit`: how many failures a run survives, and `FailureHistory`, which counts them."""

from __future__ import annotations

import re
import time
from collections import Counter
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


class PastFailure(NamedTuple):
    """A failure that counts.

    Attributes:
        age: Seconds since it happened.
        host: Machine of the rank that failed; "" if the run has one machine.
    """

    age: float
    host: str


class FailureHistory:
    """Times and machines of a run's failures.

    Args:
        limit: Failures that are allowed.
        clock: Returns the time in seconds.
    """

    def __init__(self, limit: RestartLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._failures: list[tuple[float, str]] = []

    def record(self, host: str = "") -> None:
        """Count a failure that happens now.

        Args:
            host: See `PastFailure`.
        """
        self._failures.append((self._clock(), host))

    def past(self) -> list[PastFailure]:
        """Return the failures that count, the oldest first."""
        now, seconds = self._clock(), self.limit.seconds
        return [
            PastFailure(now - then, host) for then, host in self._failures if seconds is None or now - then < seconds
        ]

    def merge(self, histories: Sequence[Sequence[tuple[float, str]]]) -> None:
        """Take the longest of several machines' histories, since a machine that joined later has missed failures.

        Args:
            histories: The failures of each machine, as of `past`.
        """
        now = self._clock()
        self._failures = [(now - age, host) for age, host in max([self.past(), *histories], key=len)]

    def decide(self, step: int | None, step_at_start: int | None, host: str = "") -> tuple[bool, str]:
        """Decide whether to restart after one more failure.

        It is allowed within the limit; beyond, if no time belongs to the limit, while the run makes progress.

        Args:
            step: Step of the newest checkpoint; None if there is none.
            step_at_start: The same when the processes were started.
            host: Machine of the one more; see `PastFailure`.

        Returns:
            Whether to restart, and what is to be said about it.
        """
        number, limit = self.count + 1, self.limit
        where = "" if step is None else f", from the checkpoint of step {step}"
        if number <= limit.failures:
            return True, f"restart {number} of {limit}{where}"
        if limit.seconds is not None:
            return False, f"this is failure {number}, and --max-restarts allows {limit}{self._most(host)}"
        if step is None or (step_at_start is not None and step <= step_at_start):
            since = "written" if step is None else f"newer than that of step {step}"
            restarts = f"{number - 1} restarts are made"
            return False, f"{restarts}, and no checkpoint is {since} since the last{self._most(host)}"
        return True, f"restart {number}, more than max_restarts={limit}, since there is a newer checkpoint{where}"

    def _most(self, host: str) -> str:
        """Return which machine had more failures than each other one, if it had several; "" if there is none."""
        hosts = Counter([*(failure.host for failure in self.past()), host])
        (name, most), *others = hosts.most_common(2)
        if not name or most == 1 or any(count == most for _, count in others):
            return ""
        return f"; {most} of the {hosts.total()} failures were on {name}"

    @property
    def count(self) -> int:
        """Number of failures that count now."""
        return len(self.past())

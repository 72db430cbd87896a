"""`make_profiler`: torch's profiler with the settings of `ProfileKwargs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def make_profiler(
    activities: Sequence[str] | None, schedule: dict[str, int] | None, **options: Any
) -> torch.profiler.profile:
    """Return a profiler.

    Args:
        activities: Names of what is recorded; None: all that there is.
        schedule: Arguments of `torch.profiler.schedule`; None: every step is recorded.
        options: Other arguments of `torch.profiler.profile`.

    Raises:
        ValueError: If an activity is not known.
    """
    known = torch.profiler.ProfilerActivity.__members__
    for name in activities or ():
        if name.upper() not in known:
            raise ValueError(f"activities has {name!r}; use {', '.join(map(str.lower, known))}")
    return torch.profiler.profile(
        activities=None if activities is None else [known[name.upper()] for name in activities],
        schedule=None if schedule is None else torch.profiler.schedule(**schedule),
        **options,
    )

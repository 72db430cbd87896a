"""`profile`: torch's profiler with the settings of `ProfileKwargs`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer_kit.accelerator.utils.dataclasses import ProfileKwargs


@contextlib.contextmanager
def profile(settings: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Enter the context of a profiler, and write its trace at the end if the settings name a folder.

    Args:
        settings: The settings.
        rank: Rank of this process, for the name of the file.

    Yields:
        The profiler.

    Raises:
        ValueError: If an activity is not known.
    """
    activities = None
    if settings.activities is not None:
        known = torch.profiler.ProfilerActivity.__members__
        for name in settings.activities:
            if name.upper() not in known:
                raise ValueError(f"activities has {name!r}; use {', '.join(map(str.lower, known))}")
        activities = [known[name.upper()] for name in settings.activities]
    schedule = settings.schedule_option
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=None if schedule is None else torch.profiler.schedule(**schedule),
        on_trace_ready=settings.on_trace_ready,
        record_shapes=settings.record_shapes,
        profile_memory=settings.profile_memory,
        with_stack=settings.with_stack,
        with_flops=settings.with_flops,
        with_modules=settings.with_modules,
    )
    with profiler:
        yield profiler
    if settings.output_trace_dir is not None:
        folder = Path(settings.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))

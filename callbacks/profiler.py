"""`Profiler`: a torch.profiler trace of some steps."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, supported_activities

from trainer_kit.callback import Callback
from trainer_kit.profiling.trace_range import trace_range

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")

# Ranges begin in a frame of `record_function.__enter__`, an event of the same track, and outlive it. Perfetto needs
# nested events and drops such ranges.
_RANGE = re.compile(r'("cat": "user_annotation",\s*"name": "(?:[^"\\]|\\.)*",\s*"pid": (\d+),\s*"tid": )(\d+)')


class Profiler(Callback):
    """Profile the optimizer steps `start` to `stop` with torch.profiler.

    It writes `steps-START-STOP.json`, a trace for chrome://tracing or <https://ui.perfetto.dev>, and
    `steps-START-STOP.txt`, a table of the 20 operators that took longest. With several processes, each writes its own
    files, with `-rank-N` in their names. Processes wait for each other, so compare all traces to find the slow one. On
    XLA the trace shows the host only.

    In the trace, the track "activities" shows the activities of the time ledger, such as `forward`, `optimizer` and
    `callback/NAME`, in ranges `ProfilerStep#N`. Step N begins at the end of the step before. The thread's own track
    shows Python functions with file and line (`train.py(12): collate`), modules (`nn.Module: Linear_0`) and operators.

    On CUDA these ranges are NVTX ranges too, which `nsys profile --trace=cuda,nvtx` shows with the kernels of each.

    On CUDA it also writes `steps-START-STOP.pickle`, a snapshot of the allocator with all allocations of these steps,
    for https://pytorch.org/memory_viz. PyTorch writes it as a pickle and the viewer takes that; trainer_kit never
    reads it.

    Args:
        start: First step to record, from 1. A run that resumes after that step records nothing.
        stop: Last step to record. A run that ends earlier writes the steps so far.
        directory: Folder of the files; None: `profile` in `args.output_dir`.
        record_shapes: Whether to record the shapes of operators' inputs.
        profile_memory: Whether to record allocations.
        with_stack: Whether to record Python functions. It makes steps slower by about a tenth and traces twice as
            large.

    Raises:
        ValueError: If `start` is below 1 or above `stop`.
    """

    priority = 100

    def __init__(
        self,
        start: int = 10,
        stop: int = 15,
        directory: str | os.PathLike[str] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = True,
    ) -> None:
        if not 1 <= start <= stop:
            raise ValueError(f"Profiler(start={start!r}, stop={stop!r}) must be steps from 1, start first")
        self.start = start
        self.stop = stop
        self.directory = directory
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profile: profile | None = None
        self._step: contextlib.AbstractContextManager[None] | None = (
            None  # the range of the current step while recording
        )
        self._has_memory_history = False

    def on_train_begin(self, run: Run) -> None:
        if run.state.step + 1 == self.start:
            self._prepare()
            self._begin(run)

    def on_step_begin(self, run: Run) -> None:
        if run.state.step + 2 == self.start and self._profile is None:
            self._prepare()  # one step early, so that recorded steps do not include the preparation

    def on_step_end(self, run: Run) -> None:
        if self._profile is None:
            return
        if self._step is None:
            self._begin(run)
        elif run.state.step < self.stop:
            self._open_step(run)
        else:
            self._finish(run)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._finish(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._finish(run)

    def _prepare(self) -> None:
        self._profile = profile(activities=supported_activities(), **self._options)
        self._profile.prepare_trace()

    def _begin(self, run: Run) -> None:
        assert self._profile is not None
        self._profile.start_trace()
        if run.strategy.device.type == "cuda" and torch.cuda.memory.get_allocator_backend() == "native":
            torch.cuda.memory._record_memory_history(stacks="python")
            self._has_memory_history = True
        self._open_step(run)

    def _open_step(self, run: Run) -> None:
        """Begin the range of the next step, which contains the ledger's ranges."""
        self._close_step(run)
        nvtx = run.strategy.device.type == "cuda" and torch.version.cuda is not None
        self._step = trace_range(f"ProfilerStep#{run.state.step + 1}", nvtx)
        self._step.__enter__()
        run.ledger.show_ranges(nvtx)

    def _close_step(self, run: Run) -> None:
        run.ledger.hide_ranges()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _finish(self, run: Run) -> None:
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        has_steps = self._step is not None
        if has_steps:
            self._close_step(run)
        else:
            recorded.start_trace()  # a prepared trace can be stopped only after its start
        recorded.stop_trace()
        if has_steps:
            self._write(run, recorded)
        if self._has_memory_history:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._has_memory_history = False

    def _write(self, run: Run, recorded: profile) -> None:
        rank = f"-rank-{run.strategy.rank}" if run.strategy.world_size > 1 else ""
        folder = Path(self.directory or Path(run.args.output_dir) / "profile")
        trace = folder / f"steps-{self.start}-{self.stop}{rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._has_memory_history:
                torch.cuda.memory._dump_snapshot(str(trace.with_suffix(".pickle")))
            recorded.export_chrome_trace(str(trace))
            _move_ranges(trace)
            trace.with_suffix(".txt").write_text(_table(recorded), encoding="utf-8")
        except OSError as error:
            _logger.warning("%s could not be written: %s; training continues", trace, error.strerror)
        else:
            _logger.info("profile written to %s and files next to it", trace)


def _move_ranges(trace: Path) -> None:
    """Move the ranges of each thread to a track of their own."""
    # PyTorch on Python 3.11 may write names that are not valid UTF-8: pytorch/pytorch issue 121219.
    text = trace.read_text(encoding="utf-8", errors="replace")
    threads = {(int(process), int(thread)) for _, process, thread in _RANGE.findall(text)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": _track(thread), "args": {"name": "activities"}}
        for process, thread in sorted(threads)
    ]
    text = _RANGE.sub(lambda match: f'{match[1]}"{_track(int(match[3]))}"', text)
    head, key, events = text.partition('"traceEvents": [')
    trace.write_text("".join([head, key, *(f"\n{json.dumps(name)}," for name in names), events]), encoding="utf-8")


def _track(thread: int) -> str:
    return f"activities of {thread}"


def _is_operator(event: Any) -> bool:
    """Return whether an event is an operator or kernel, not a range or (since torch 2.13) a Python function."""
    return not getattr(event, "is_python_function", False) and not event.is_user_annotation


def _table(recorded: profile) -> str:
    """Return a table of the 20 operators that took longest, by device time if it was recorded."""
    events = recorded.events()
    assert events is not None
    events[:] = [event for event in events if _is_operator(event)]
    averages = recorded.key_averages()
    has_device_times = any(average.self_device_time_total for average in averages)
    key = "self_device_time_total" if has_device_times else "self_cpu_time_total"
    table: str = averages.table(sort_by=key, row_limit=20, max_name_column_width=80)
    return table

"""`Profiler`: a torch.profiler trace of some steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, schedule, supported_activities

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")


class Profiler(Callback):
    """Records what the optimizer steps `start` to `stop` spend their time on.

    Writes `steps-START-STOP.json`, a trace for chrome://tracing or https://ui.perfetto.dev, and `steps-START-STOP.txt`,
    a table of the 20 operators that took longest. In the trace each step is a scope `ProfilerStep#N`, counted from the
    first one recorded.

    Args:
        start: First step to record, from 2, as the step before it warms the profiler up. A run that is resumed beyond
            that records nothing.
        stop: Last step to record.
        directory: Folder of the files; None: `profile` in `args.output_dir`.
        record_shapes: Records the shapes of operators' inputs.
        profile_memory: Records allocations.
        with_stack: Records the Python source of each operator, which slows the steps.

    Raises:
        ValueError: If `start` is below 2 or above `stop`.
    """

    priority = 100

    def __init__(
        self,
        start: int = 10,
        stop: int = 15,
        directory: str | os.PathLike[str] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        if not 2 <= start <= stop:
            raise ValueError(f"Profiler(start={start!r}, stop={stop!r}) must be steps from 2, start first")
        self.start = start
        self.stop = stop
        self.directory = directory
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profile: profile | None = None
        self._files = Path()

    def on_step_begin(self, run: Run) -> None:
        if run.state.step + 2 == self.start and run.strategy.is_main:
            directory = Path(self.directory or Path(run.args.output_dir) / "profile")
            self._files = directory / f"steps-{self.start}-{self.stop}"
            self._profile = profile(
                activities=supported_activities(),
                schedule=schedule(wait=0, warmup=1, active=self.stop - self.start + 1, repeat=1),
                on_trace_ready=self._write,
                **self._options,
            )
            self._profile.start()

    def on_step_end(self, run: Run) -> None:
        if self._profile is not None:
            self._profile.step()
            if run.state.step >= self.stop:
                self._finish()

    def on_train_end(self, run: Run) -> None:
        self._finish()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._profile is not None:
            self._profile.stop()  # writes what was recorded, if the last step was not reached
            self._profile = None

    def _write(self, recorded: profile) -> None:
        self._files.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(f"{self._files}.json")
        averages = recorded.key_averages()
        has_device_times = any(average.self_device_time_total for average in averages)
        key = "self_device_time_total" if has_device_times else "self_cpu_time_total"
        self._files.with_suffix(".txt").write_text(averages.table(sort_by=key, row_limit=20), encoding="utf-8")
        _logger.info("profile written to %s.json and .txt", self._files)

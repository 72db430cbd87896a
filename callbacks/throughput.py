"""`Throughput`: the speed of the run, its time by activity, and its utilization of the devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_kit.callback import Callback
from trainer_kit.profiling.peak_flops import TERA, computing_dtype, peak_of, tf32_peak
from trainer_kit.profiling.time_ledger import USEFUL, Ledger

from .operations import Operations

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")

_NO_TRAINING = frozenset({"setup", "evaluation", "saving", "regroup", "lost", "down", "callback/Throughput"})
_LARGE = 2**40
"""Unit in which operations are summed over processes, with the remainder apart: the sum may exceed 63 bits."""


class _Interval(NamedTuple):
    """Totals up to a point of time: seconds of training, and floating-point operations of this process."""

    seconds: float
    data_seconds: float
    step: float
    samples: float
    tokens: float
    model: float
    hardware: float


class Throughput(Callback):
    """Add the speed since the previous record, over all processes, to every record.

    - `samples_per_second` (samples/s): Samples by the time without evaluations and checkpoints.
    - `steps_per_second` (steps/s): Optimizer steps by the same time.
    - `tokens_per_second` (tokens/s): Tokens without padding by the same time, if batches have tokens.
    - `data_wait` (share, 0 to 1): Share of the same time in which the loop waits for the next batch.
    - `model_flops_per_second` (FLOP/s): Operations that the model needs, forward and backward.
    - `hardware_flops_per_second` (FLOP/s): Operations including recomputation (activation checkpointing).
    - `mfu` (share, 0 to 1): Model FLOP/s divided by the peak FLOP/s of the devices (Chowdhery et al. 2022, appendix B).
    - `seconds/ACTIVITY` (s): Time by activity: `setup`, `data`, `forward`, `backward`, `optimizer`, `logging`,
      `evaluation`, `saving`, `callback/NAME`, `loop` (everything else), `regroup`, `lost` and `down`.
    - `goodput` (share, 0 to 1): Share of that time spent in `forward`, `backward` and `optimizer`.
    - `wall_seconds` (s): Time of all starts of the run, in the metrics of the whole run only.

    If machines or processes changed, the metrics of the whole run also have these, over all starts:

    - `memberships` (count): Number of memberships, that of the beginning included.
    - `machines_lost`, `machines_joined` (machines): How often one was lost or left, and how often one came, if the
      launcher lets them change.
    - `regrouping_seconds` (s): Time from the last work before each change to the first work after it.
    - `steps_again` (steps): Steps that were taken again, as far as they were recorded.
    - `reduced_seconds` (s): Time multiplied by the missing part of the machines.
    - `slowest_seconds` (s): Time of this start in which this process waited for the slowest one between steps.

    If machines are missing, their part is missing from `goodput` too, see `trainer_kit.profiling.time_ledger`. The full
    size is the largest number of processes since the launch.

    The metrics of the whole run have `seconds/ACTIVITY` and `goodput` over all starts of the run, and FLOP/s and MFU of
    this start.

    Operations are counted while the first step runs, and in a few later steps if batches have new shapes (see
    `trainer_kit.profiling.flops`). Counting changes no value. A counted step is slower, so rates exclude it unless
    there is no other step since the previous record. Metrics that are not known are left out, and the log gives the
    reason: a device without a known peak, FLOP/s on XLA, or a compiled model that does not run on fake tensors.
    """

    priority = 110

    def __init__(self) -> None:
        self._operations = Operations()
        self._seconds: dict[str, float] = {}  # by activity, at the last record
        self._missing: dict[str, float] = {}  # of them, for machines that were missing
        self._recorded: _Interval | None = None  # totals at the last record
        self._since: _Interval | None = None  # totals at the last record, plus the counted steps since
        self._counting_since: _Interval | None = None
        self._in_all = [0.0, 0.0, 0.0]  # of this start: seconds, model operations, hardware operations
        self._peak: float | None = None
        self._told: set[str] = set()
        self._has_joined = False

    def on_train_begin(self, run: Run) -> None:
        self._operations.begin(run)
        self._in_all, self._peak, self._counting_since = [0.0, 0.0, 0.0], None, None
        self._has_joined = False
        self._told.clear()
        _suggest_tf32(run)
        self._missing = run.ledger.missing()
        self._seconds, self._recorded = self._measure(run)
        self._since = self._recorded
        self._wait()

    def on_step_begin(self, run: Run) -> None:
        if self._operations.due or self._counting_since is not None:  # an interrupted step is repeated
            self._counting_since = self._measure(run)[1]
            self._operations.start(run)

    def on_substep_end(self, run: Run) -> None:
        if self._counting_since is not None:
            self._operations.note(run)

    def on_step_end(self, run: Run) -> None:
        if self._counting_since is not None:
            self._operations.note(run)
            self._operations.stop()
            began, self._counting_since = self._counting_since, None
            assert self._since is not None
            step = (after - before for after, before in zip(self._measure(run)[1], began, strict=True))
            self._since = _Interval(*(before + own for before, own in zip(self._since, step, strict=True)))
            self._wait()

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._missing = run.ledger.missing()
        self._seconds, self._recorded = self._measure(run)
        self._since = self._recorded

    def on_regroup(self, run: Run) -> None:
        # Some processes may have given their metrics of this step, which is collective, and others not.
        seconds, self._recorded = self._measure(run)
        self._since = self._recorded
        if run.ledger.has_joined and not self._has_joined:  # the time of the run so far is not this process's
            self._has_joined, self._seconds, self._missing = True, seconds, run.ledger.missing()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._operations.stop()

    def metrics(self, run: Run) -> dict[str, Any]:
        if self._recorded is None or self._since is None or run.state.step == self._recorded.step:
            return {}
        all_seconds, now = self._measure(run)
        since = self._since if now.step > self._since.step else self._recorded
        passed = {name: value - self._seconds.get(name, 0.0) for name, value in all_seconds.items()}
        missing_before, self._missing = self._missing, run.ledger.missing()
        missing = {name: value - missing_before.get(name, 0.0) for name, value in self._missing.items()}
        self._seconds, self._recorded, self._since = all_seconds, now, now
        flops = self._flops(run, now.model - since.model, now.hardware - since.hardware)
        self._wait()
        seconds = now.seconds - since.seconds
        if seconds <= 0:
            return {}
        figures = {
            "samples_per_second": (now.samples - since.samples) / seconds,
            "steps_per_second": (now.step - since.step) / seconds,
            "data_wait": min(1.0, (now.data_seconds - since.data_seconds) / seconds),
        }
        if now.tokens > since.tokens:
            figures["tokens_per_second"] = (now.tokens - since.tokens) / seconds
        if flops is not None:
            self._in_all = [total + own for total, own in zip(self._in_all, (seconds, *flops), strict=True)]
            figures |= self._use(run, seconds, *flops)
        return figures | _by_activity(passed, missing)

    def summary(self, run: Run) -> dict[str, Any]:
        self.metrics(run)  # adds the steps since the last record
        seconds = run.ledger.seconds()
        figures = self._use(run, *self._in_all) if self._in_all[1] else {}
        figures |= {"wall_seconds": sum(seconds.values())} | _by_activity(seconds, run.ledger.missing())
        return figures | _of_memberships(run.ledger)

    def _wait(self) -> None:
        """Leave the hooks of a step out until one is counted."""
        is_due = self._operations.due or self._counting_since is not None
        self._idle_hooks = () if is_due else ("on_step_begin", "on_substep_end", "on_step_end")

    def _measure(self, run: Run) -> tuple[dict[str, float], _Interval]:
        seconds, state, flops = run.ledger.seconds(), run.state, self._operations.so_far(run)
        training = sum(value for name, value in seconds.items() if name not in _NO_TRAINING)
        data = seconds.get("data", 0.0)
        return seconds, _Interval(training, data, state.step, state.samples, state.tokens, flops.model, flops.hardware)

    def _flops(self, run: Run, model: float, hardware: float) -> tuple[float, float] | None:
        """Return the operations of all processes; None if they are not known on one. Collective."""
        operations = self._operations
        fails = operations.reason is not None
        parts = (*divmod(int(model), _LARGE), *divmod(int(hardware), _LARGE))
        collectives = run.strategy.collectives
        sums = collectives.all_reduce_ints([*parts, operations.unknown, fails])
        operations.expect(sums[4])
        if sums[5] or not any(sums[:2]):
            self._tell("FLOP/s are left out", operations.reason)
            return None
        size = collectives.reader_size  # each process counts the whole model
        return (sums[0] * _LARGE + sums[1]) / size, (sums[2] * _LARGE + sums[3]) / size

    def _use(self, run: Run, seconds: float, model: float, hardware: float) -> dict[str, float]:
        figures = {"model_flops_per_second": model / seconds, "hardware_flops_per_second": hardware / seconds}
        strategy = run.strategy
        if self._peak is None and "MFU is left out" not in self._told:
            try:
                dtype = computing_dtype(run.model, run.args.mixed_precision)
                self._peak = peak_of(strategy.device, dtype).flops_per_second
            except LookupError as error:
                self._tell("MFU is left out", str(error))
        if self._peak is not None:
            figures["mfu"] = model / seconds / (self._peak * strategy.world_size * strategy.devices)
        return figures

    def _tell(self, what: str, reason: str | None) -> None:
        if reason is not None and what not in self._told:
            self._told.add(what)
            _logger.info("%s: %s", what, reason)


def _suggest_tf32(run: Run) -> None:
    """Log that matrix products could be faster, if the device has TF32 and the run computes in full float32."""
    device = run.strategy.device
    if run.args.float32_matmul_precision is not None or not run.strategy.is_main:
        return
    if computing_dtype(run.model, run.args.mixed_precision) != torch.float32 or (faster := tf32_peak(device)) is None:
        return
    peak = peak_of(device, torch.float32).flops_per_second
    _logger.info(
        "this run computes in float32, at up to %.0f TFLOP/s on this device; float32_matmul_precision='high' (TF32) "
        "allows %.0f, mixed_precision='bf16' more; 'highest' keeps float32 without this line",
        peak / TERA, faster.flops_per_second / TERA,
    )  # fmt: skip


def _of_memberships(ledger: Ledger) -> dict[str, float]:
    """Return what changes of machines and processes have cost; empty if there were none."""
    history = ledger.memberships
    if not history.has_changed:
        return {}
    return {
        "memberships": len(history.entries),
        "machines_lost": history.lost,
        "machines_joined": history.joined,
        "regrouping_seconds": history.pause,
        "steps_again": history.steps_again,
        "reduced_seconds": ledger.reduced(),
        "slowest_seconds": ledger.slowest,
    }


def _by_activity(seconds: Mapping[str, float], missing: Mapping[str, float]) -> dict[str, float]:
    """Return the positive seconds by activity, and the goodput."""
    figures = {f"seconds/{name}": value for name, value in seconds.items() if value > 0}
    total = sum(figures.values())
    if total > 0:
        useful = sum(figures.get(f"seconds/{name}", 0.0) - missing.get(name, 0.0) for name in USEFUL)
        figures["goodput"] = useful / total
    return figures

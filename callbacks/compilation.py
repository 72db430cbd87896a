"""`Compilation`: counts compilations, and warns about those after the warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_kit.callback import Callback
from trainer_kit.utils.units import format_duration
from trainer_kit.utils.user_warnings import warn

if TYPE_CHECKING:
    from trainer_kit.run import Run

_LEAST_STEPS = 3
"""Minimal steps of the warm-up: the first two compile even if all batches have one shape."""

_COMPILED_STEPS = 10
"""Steps that may compile in the warm-up: enough for a few lengths of text, too few for a length per batch."""


class _Snapshot(NamedTuple):
    """Compilations so far, their seconds, and the newest shape of a batch (None before the first)."""

    compiles: int
    seconds: float
    newest: Any


class Compilation(Callback):
    """Count compilations, and warn if a step compiles again after the warm-up.

    It adds this process's totals since training began to every record, or nothing if there are no compilations:

    - `xla/compiles`, `compile/compiles` (compilations): Compilations by XLA, or by `torch.compile`.
    - `xla/compile_seconds`, `compile/compile_seconds` (s): Their duration.

    The warning is given once, with the shape that caused the compilation and a remedy. The warm-up is the first whole
    epoch of this start, at least 3 steps, and the first evaluation of each dataset. It ends early when 10 steps have
    compiled; with gradient accumulation up to 30, since a shape is compiled for several positions in a step.
    """

    def __init__(self) -> None:
        self._began = self._mark = _Snapshot(0, 0.0, None)
        self._training = self._warned = False
        self._is_warm = False
        self._warm_up_steps = self._last_warm_up_epoch = 0
        self._compiled_steps = self._evaluations = 0
        self._most_compiled_steps = _COMPILED_STEPS

    def on_train_begin(self, run: Run) -> None:
        state = run.state
        self._began = self._mark = _measure(run)
        self._training, self._warned = True, False
        self._most_compiled_steps = _COMPILED_STEPS * min(3, run.args.gradient_accumulation_steps)
        self._warm_up_steps = state.step + _LEAST_STEPS
        self._last_warm_up_epoch = state.epoch + (state.position > 0)
        self._compiled_steps = self._evaluations = 0
        # A first compilation is no repeated one, so the beginning of a step matters only after it.
        self._idle_hooks = () if run.strategy.static_shapes or self._mark.compiles else ("on_step_begin",)

    def on_step_begin(self, run: Run) -> None:
        if self._warned:
            return
        state = run.state
        is_past = state.step >= self._warm_up_steps and state.epoch > self._last_warm_up_epoch
        self._is_warm = is_past or self._compiled_steps >= self._most_compiled_steps
        self._mark = _measure(run)

    def on_step_end(self, run: Run) -> None:
        if self._warned:
            return
        now = _measure(run)
        if now.compiles > self._mark.compiles:
            self._compiled_steps += 1
            if self._is_warm:
                self._warn(run, f"step {run.state.step}", now)
            self._idle_hooks = ()

    def on_evaluate_begin(self, run: Run) -> None:
        self._mark = _measure(run)

    def on_evaluate_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._evaluations += 1
        datasets = len(run.eval_dataset) if isinstance(run.eval_dataset, Mapping) else 1
        now = _measure(run)
        if now.compiles > self._mark.compiles and self._evaluations > datasets and self._training and not self._warned:
            self._warn(run, f"the evaluation at step {run.state.step}", now)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._training = False

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._training = False

    def metrics(self, run: Run) -> dict[str, Any]:
        count, seconds, _ = _measure(run)
        count, seconds = count - self._began.compiles, seconds - self._began.seconds
        if not count and not run.strategy.static_shapes:
            return {}
        prefix = "xla" if run.strategy.static_shapes else "compile"
        return {f"{prefix}/compiles": count, f"{prefix}/compile_seconds": seconds}

    def _warn(self, run: Run, what: str, now: _Snapshot) -> None:
        self._warned = True
        shape = now.newest if now.newest is not self._mark.newest else None
        against = run.strategy.shapes.against_usual(shape) if shape is not None else None
        cause, change = (
            _cause_without_shape(run) if against is None else (f"a new shape came, {against[0]}", against[1])
        )
        if run.strategy.is_main:
            duration = format_duration(now.seconds - self._mark.seconds)
            warn(
                f"{what} compiled again ({duration}) after the warm-up: {cause}. To change it, {change}. This is "
                "said once; records count what is compiled.",
            )


def _measure(run: Run) -> _Snapshot:
    return _Snapshot(*run.strategy.device_info.compilations(), run.strategy.shapes.newest)


def _cause_without_shape(run: Run) -> tuple[str, str]:
    """Return the cause of a compilation for a known shape, and the remedy."""
    if not run.strategy.static_shapes:
        cause = "no shape was new, so a Python value that the model's code depends on has changed"
        return cause, "start with TORCH_LOGS=recompiles in the environment, which names that value"
    cause = (
        "no shape was new, so a value was read from the device in the middle of it (.item(), float(), print) or a "
        "Python number in a computation became 0, 1 or -1, which are compiled in"
    )
    if run.args.gradient_accumulation_steps > 1:
        cause += ", or a known shape came at another place in the step's accumulation"
    return cause, "read values after the step, and keep changing numbers in tensors on the device"

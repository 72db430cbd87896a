"""`Progress`: a progress bar on a terminal or in a notebook."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tqdm

from trainer_kit.callback import Callback

from .formatting import HIDDEN, metrics_line, pairs, summary_line

with warnings.catch_warnings():
    # tqdm warns in a notebook without widgets, where the text bar works too.
    warnings.simplefilter("ignore", tqdm.TqdmWarning)
    from tqdm.contrib.logging import logging_redirect_tqdm

if TYPE_CHECKING:
    from pathlib import Path

    from trainer_kit.run import Run

_HIDDEN = HIDDEN | {"grad_norm", "tokens_per_second"}


class Progress(Callback):
    """Show a progress bar of optimizer steps with the metrics of the last record.

    A resumed run starts at its step. The bar moves with every step; its metrics change with every record. Evaluation
    metrics and log lines appear above it. If steps are compiled, the bar says so in the steps that always compile: the
    first of this start, and on XLA also the second.
    """

    priority = 100
    is_reporter = True

    def __init__(self) -> None:
        self._bar: tqdm.tqdm[Any] | None = None
        self._redirected = contextlib.ExitStack()
        self._compiling_steps = 0  # still to come
        self._compiles_evaluation = False

    def on_train_begin(self, run: Run) -> None:
        self._close()
        # On XLA the second step is another computation, since it starts from a state that the first one makes.
        self._compiling_steps = 2 if run.strategy.static_shapes else int(run.args.torch_compile is not False)
        self._compiles_evaluation = self._compiling_steps > 0
        if run.strategy.is_main:
            bar = _bar_class()
            self._bar = bar(
                total=run.total_steps or None,
                initial=run.state.step,
                desc="train",
                unit="step",
                dynamic_ncols=True,
                file=sys.stderr,
            )
            self._redirected.enter_context(logging_redirect_tqdm(_console_loggers(), tqdm_class=bar))
            self._redirected.enter_context(_warnings_above(bar))

    def on_step_begin(self, run: Run) -> None:
        if self._bar is not None and self._compiling_steps:
            self._bar.set_description(f"compiling (step {run.state.step + 1})")

    def on_step_end(self, run: Run) -> None:
        if self._bar is None:
            return
        self._bar.update()
        if self._compiling_steps:
            self._compiling_steps -= 1
            self._bar.set_description("train")

    def on_rollback(self, run: Run, directory: Path) -> None:
        self.on_regroup(run)

    def on_regroup(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.total = run.total_steps or None
            self._bar.update(run.state.step - self._bar.n)
        elif run.strategy.is_main:  # the last main process is lost
            self.on_train_begin(run)

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if self._bar is not None:  # drawn with the bar's next move
            self._bar.set_postfix_str(pairs(record, _HIDDEN), refresh=False)

    def on_evaluate_begin(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.set_description("evaluate (compiling first)" if self._compiles_evaluation else "evaluate")
            self._compiles_evaluation = False

    def on_evaluate_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if self._bar is not None:
            self._bar.set_description("train", refresh=False)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        if metrics and run.strategy.is_main:
            _bar_class().write(f"step {run.state.step}  {metrics_line(metrics)}", file=sys.stderr)

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self.on_evaluate(run, metrics)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if self._bar is not None and metrics is not None:
            self._bar.write(summary_line(metrics), file=sys.stderr)
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        self._redirected.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar_class() -> type[tqdm.tqdm[Any]]:
    """Return the widget bar in a notebook with ipywidgets, else the text bar."""
    if "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets"):
        from tqdm.auto import tqdm as auto

        return auto
    return tqdm.tqdm


@contextlib.contextmanager
def _warnings_above(bar: type[tqdm.tqdm[Any]]) -> Iterator[None]:
    """Show Python's warnings above the bar, on lines of their own."""
    show = warnings.showwarning

    def show_above(*details: Any, **more: Any) -> None:
        with bar.external_write_mode(file=sys.stderr):
            show(*details, **more)

    warnings.showwarning = show_above
    try:
        yield
    finally:
        warnings.showwarning = show


def _console_loggers() -> list[logging.Logger]:
    """Return the loggers that write to the terminal, and the root logger if trainer_kit's has no handler."""
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [logger for logger in known if isinstance(logger, logging.Logger) and _writes_to_console(logger)]
    return loggers if logging.getLogger("trainer_kit").hasHandlers() else [logging.root, *loggers]


def _writes_to_console(logger: logging.Logger) -> bool:
    streams = (sys.stdout, sys.stderr)
    return any(isinstance(each, logging.StreamHandler) and each.stream in streams for each in logger.handlers)

"""The callbacks that ship with trainer_kit, and `default_callbacks`, those that every run has.

Within a hook, callbacks are called by `priority`, then in the order of the list:

- -100: those that change the model (`EMA`, `Freezing`), so that all others see it as it will be used;
- 0: yours, and those that only ask for things (`Preemption`);
- 50: from here on (`Checkpointing`) an evaluation is judged: `run.state.best_metric` and `best_step` hold it;
- 100: those that write down what happened (`Progress`, `Console`, `TensorBoard`, `JsonLines`) and those of
  transformers, so that they also see what yours added to a record or to an evaluation's metrics;
- 110: `Throughput`, which counts the operations of a step without what the others compute;
- 150: `EarlyStopping`, which judges what all others added, and speaks after the record that it judged;
- 200: `Report`, which reads what was written.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .from_transformers import from_transformers

if TYPE_CHECKING:
    from trainer_kit.callback import Callback
    from trainer_kit.config.arguments import TrainingArguments

    from .checkpointing import Checkpointing
    from .compilation import Compilation
    from .console import Console
    from .early_stopping import EarlyStopping
    from .ema import EMA
    from .freezing import Freezing
    from .jsonl import JsonLines, read_log
    from .memory import Memory
    from .preemption import Preemption
    from .profiler import Profiler
    from .progress import Progress
    from .report import Report
    from .tensorboard import TensorBoard
    from .throughput import Throughput

__all__ = [
    "EMA",
    "Checkpointing",
    "Compilation",
    "Console",
    "EarlyStopping",
    "Freezing",
    "JsonLines",
    "Memory",
    "Preemption",
    "Profiler",
    "Progress",
    "Report",
    "TensorBoard",
    "Throughput",
    "default_callbacks",
    "from_transformers",
    "read_log",
]

# Loaded when first asked for, so that nobody pays for tensorboard or tqdm without using them. (`from_transformers` is
# imported above: the module has the same name, and would take the function's place if it were imported later.)
_MODULES = {
    "Checkpointing": "checkpointing",
    "Compilation": "compilation",
    "Console": "console",
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "Freezing": "freezing",
    "JsonLines": "jsonl",
    "Memory": "memory",
    "Preemption": "preemption",
    "Profiler": "profiler",
    "Progress": "progress",
    "Report": "report",
    "TensorBoard": "tensorboard",
    "Throughput": "throughput",
    "read_log": "jsonl",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def default_callbacks(args: TrainingArguments, own: Sequence[Callback] = ()) -> list[Callback]:
    """The callbacks of every run, new instances.

    Checkpoints, clean leaving on signals, compilations, memory and throughput always; a progress bar on a terminal or
    in a notebook, plain lines elsewhere and with `args.disable_tqdm` (neither with that and a `log_level` of "error");
    the writers that `args.report_to` names; a `Profiler` of the steps that `args.profile` names. One of the user's
    `own` callbacks takes the place of a default of its class; bar and lines take each other's.
    """
    from .checkpointing import Checkpointing
    from .compilation import Compilation
    from .memory import Memory
    from .preemption import Preemption
    from .throughput import Throughput

    callbacks: list[Callback] = [Checkpointing(), Preemption(), Compilation(), Memory(), Throughput()]
    if args.profile is not None:
        from .profiler import Profiler

        first, last = map(int, args.profile.split(":"))
        callbacks.append(Profiler(first, last))
    quiet = args.disable_tqdm and args.log_level in ("error", "critical")
    if not quiet and not any(type(each).__name__ in ("Progress", "Console") for each in own):
        callbacks.append(_display(args))
    if "tensorboard" in args.report_to:
        from .tensorboard import TensorBoard

        callbacks.append(TensorBoard())
    if "jsonl" in args.report_to:
        from .jsonl import JsonLines

        callbacks.append(JsonLines())
    if "html" in args.report_to:
        from .report import Report

        callbacks.append(Report())
    return [each for each in callbacks if not any(isinstance(one, type(each)) for one in own)]


def _display(args: TrainingArguments) -> Callback:
    if not args.disable_tqdm and (_is_terminal() or _is_notebook()):
        from .progress import Progress

        return Progress()
    from .console import Console

    return Console()


def _is_terminal() -> bool:
    """Whether a bar can be drawn; some terminals without a window (`docker -t`, `script`) have no columns."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return all(os.get_terminal_size(sys.stderr.fileno()))


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook (which has no terminal, and shows bars all the same)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config

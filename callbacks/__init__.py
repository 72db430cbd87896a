"""The callbacks that ship with trainer_kit, and `default_callbacks`, those of every run.

Within a hook, callbacks are called by `priority`, then in the order of the list:

- -100: callbacks that change the model (`EMA`, `Freezing`), so that all others see the changed model;
- 0: your callbacks, and those that only make requests (`Preemption`, `PeerCopies`);
- 50: `Checkpointing`; from here on, `run.state.best_metric` and `best_step` include the current evaluation;
- 100: callbacks that write records (`Progress`, `Console`, `TensorBoard`, `JsonLines`, `Profiler`) and those of
  transformers, so that they see the numbers that your callbacks add to a record or to an evaluation's metrics;
- 110: `Throughput`, which counts the operations of a step without those of other callbacks, and `SlowProcesses`;
- 150: `EarlyStopping`, which uses the metrics that all others add, and logs after the record;
- 200: `Report`, which reads the written records; 205: `Tracking`, which may upload its page; 210: `PushToHub`, which
  pushes what all others have written; 300: `FastDevRun`, which removes that.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer_kit.config.reporters import REPORTERS

from .from_transformers import from_transformers

if TYPE_CHECKING:
    from trainer_kit.callback import Callback
    from trainer_kit.config.arguments import TrainingArguments

    from .checkpointing import Checkpointing
    from .compilation import Compilation
    from .console import Console
    from .early_stopping import EarlyStopping
    from .ema import EMA
    from .fast_dev_run import FastDevRun
    from .freezing import Freezing
    from .jsonl import JsonLines, read_log
    from .max_time import MaxTime
    from .memory import Memory
    from .neftune import Neftune
    from .peer_copies import PeerCopies
    from .preemption import Preemption
    from .profiler import Profiler
    from .progress import Progress
    from .push_to_hub import PushToHub
    from .report import Report
    from .slow_processes import SlowProcesses
    from .tensorboard import TensorBoard
    from .throughput import Throughput
    from .torch_modes import DetectAnomaly, Deterministic
    from .tracking import Tracking

__all__ = [
    "EMA",
    "Checkpointing",
    "Compilation",
    "Console",
    "DetectAnomaly",
    "Deterministic",
    "EarlyStopping",
    "FastDevRun",
    "Freezing",
    "JsonLines",
    "MaxTime",
    "Memory",
    "Neftune",
    "PeerCopies",
    "Preemption",
    "Profiler",
    "Progress",
    "PushToHub",
    "Report",
    "SlowProcesses",
    "TensorBoard",
    "Throughput",
    "Tracking",
    "default_callbacks",
    "from_transformers",
    "read_log",
]

# Loaded on first access: tensorboard and tqdm are slow to import. (`from_transformers` is imported above: its module
# has the same name and would replace the function if it were imported later.)
_MODULES = {
    "Checkpointing": "checkpointing",
    "Compilation": "compilation",
    "Console": "console",
    "DetectAnomaly": "torch_modes",
    "Deterministic": "torch_modes",
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "FastDevRun": "fast_dev_run",
    "Freezing": "freezing",
    "JsonLines": "jsonl",
    "MaxTime": "max_time",
    "Memory": "memory",
    "Neftune": "neftune",
    "PeerCopies": "peer_copies",
    "Preemption": "preemption",
    "Profiler": "profiler",
    "Progress": "progress",
    "PushToHub": "push_to_hub",
    "Report": "report",
    "SlowProcesses": "slow_processes",
    "TensorBoard": "tensorboard",
    "Throughput": "throughput",
    "Tracking": "tracking",
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
    """Return new instances of the default callbacks of a run.

    `Checkpointing`, `Preemption`, `Compilation`, `Memory`, `Throughput` and `SlowProcesses` are always included.
    `Progress` is included on a terminal or in a notebook, else `Console`; with `args.disable_tqdm` it is `Console`, or
    neither if `log_level` is "error" or "critical". `args.report_to` names the writers, `args.profile` the steps of a
    `Profiler`, and `args.neftune_noise_alpha` is that of `Neftune`.

    Args:
        args: The arguments of the run.
        own: The user's callbacks. Each replaces a default of its class; `Progress` and `Console` replace each other.
    """
    from .checkpointing import Checkpointing
    from .compilation import Compilation
    from .memory import Memory
    from .preemption import Preemption
    from .slow_processes import SlowProcesses
    from .throughput import Throughput

    callbacks: list[Callback] = [
        Checkpointing(), Preemption(), Compilation(), Memory(), Throughput(), SlowProcesses()
    ]  # fmt: skip
    if args.neftune_noise_alpha is not None:
        from .neftune import Neftune

        callbacks.append(Neftune(args.neftune_noise_alpha))
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
    trackers = [each for each in args.report_to if each not in REPORTERS]
    if trackers:
        from .tracking import Tracking

        callbacks.append(Tracking(trackers))
    return [each for each in callbacks if not any(isinstance(one, type(each)) for one in own)]


def _display(args: TrainingArguments) -> Callback:
    if not args.disable_tqdm and (_is_terminal() or _is_notebook()):
        from .progress import Progress

        return Progress()
    from .console import Console

    return Console()


def _is_terminal() -> bool:
    """Return whether a bar can be drawn; some terminals without a window (`docker -t`, `script`) have no columns."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    return all(os.get_terminal_size(sys.stderr.fileno()))


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows bars without a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config

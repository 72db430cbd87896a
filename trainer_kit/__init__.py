"""trainer_kit trains PyTorch models: `Trainer(model, args, train_dataset).train()`, from one CPU to many machines.

The names below are imported when they are first used, so that `import trainer_kit` costs next to nothing.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer_kit._version import __version__

if TYPE_CHECKING:
    from trainer_kit import callbacks
    from trainer_kit.accelerator import Accelerator, ProjectConfiguration, set_seed
    from trainer_kit.callback import Callback
    from trainer_kit.checkpoint import load_checkpoint_in_model
    from trainer_kit.config.arguments import TrainingArguments
    from trainer_kit.data.sampler_order import balanced_sampler
    from trainer_kit.data.source import ReadyBatches
    from trainer_kit.errors import CallbackError, FolderInUseError, NonFiniteError, SaveError
    from trainer_kit.launch.config import write_basic_config
    from trainer_kit.launch.notebook import notebook_launcher
    from trainer_kit.loop.prediction import EvalPrediction, PredictionOutput
    from trainer_kit.loss.means import log_mean
    from trainer_kit.planning import TrainingPlan
    from trainer_kit.report.summary import print_summary
    from trainer_kit.run import Run, TrainOutput
    from trainer_kit.state import Requests, Stateful, TrainState
    from trainer_kit.strategies.base import Strategy
    from trainer_kit.strategies.ddp import DDP
    from trainer_kit.strategies.fsdp.strategy import FSDP
    from trainer_kit.strategies.multinode import MultiNode
    from trainer_kit.strategies.precision import Precision
    from trainer_kit.strategies.single import SingleDevice
    from trainer_kit.strategies.xla.strategy import XLA
    from trainer_kit.trainer import Trainer

__all__ = [
    "DDP",
    "FSDP",
    "XLA",
    "Accelerator",
    "Callback",
    "CallbackError",
    "EvalPrediction",
    "FolderInUseError",
    "MultiNode",
    "NonFiniteError",
    "Precision",
    "PredictionOutput",
    "ProjectConfiguration",
    "ReadyBatches",
    "Requests",
    "Run",
    "SaveError",
    "SingleDevice",
    "Stateful",
    "Strategy",
    "TrainOutput",
    "TrainState",
    "Trainer",
    "TrainingArguments",
    "TrainingPlan",
    "__version__",
    "balanced_sampler",
    "callbacks",
    "load_checkpoint_in_model",
    "log_mean",
    "notebook_launcher",
    "print_summary",
    "set_seed",
    "write_basic_config",
]

_HOMES = {
    "Accelerator": "accelerator",
    "Callback": "callback",
    "CallbackError": "errors",
    "DDP": "strategies.ddp",
    "EvalPrediction": "loop.prediction",
    "FSDP": "strategies.fsdp.strategy",
    "MultiNode": "strategies.multinode",
    "NonFiniteError": "errors",
    "Precision": "strategies.precision",
    "PredictionOutput": "loop.prediction",
    "ProjectConfiguration": "accelerator",
    "ReadyBatches": "data.source",
    "Requests": "state",
    "Run": "run",
    "FolderInUseError": "errors",
    "SaveError": "errors",
    "SingleDevice": "strategies.single",
    "Stateful": "state",
    "Strategy": "strategies.base",
    "TrainOutput": "run",
    "TrainState": "state",
    "Trainer": "trainer",
    "TrainingArguments": "config.arguments",
    "TrainingPlan": "planning",
    "XLA": "strategies.xla.strategy",
    "balanced_sampler": "data.sampler_order",
    "load_checkpoint_in_model": "checkpoint",
    "log_mean": "loss.means",
    "notebook_launcher": "launch.notebook",
    "print_summary": "report.summary",
    "set_seed": "accelerator",
    "write_basic_config": "launch.config",
}

_REPLACEMENTS = {
    "EarlyStoppingCallback": "use trainer_kit.callbacks.EarlyStopping",
    "Seq2SeqTrainer": "use Trainer; predict_with_generate=True generates in evaluations",
    "Seq2SeqTrainingArguments": "use TrainingArguments, which has its arguments, or transformers' own",
    "TrainerCallback": "use Callback, or give transformers' own to callbacks.from_transformers",
}
"""What stands for a name of transformers that scripts import together with the Trainer."""


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return _imported("callbacks")
    if name in _REPLACEMENTS:  # of an AttributeError, an import statement would not show the text
        raise ImportError(f"cannot import name {name!r} from {__name__!r}: {_REPLACEMENTS[name]}", name=name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(_imported(_HOMES[name]), name)
    globals()[name] = value
    return value


def _imported(module: str) -> ModuleType:
    """Import a module of the package, without the garbage collections that its allocations would set off.

    A module keeps what it allocates. A full collection searches the objects of torch too, which takes longer than the
    import.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"{__name__}.{module}")
    finally:
        if is_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

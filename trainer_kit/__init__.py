"""trainer_kit trains PyTorch models: `Trainer(model, args, train_dataset).train()`, from one CPU to many machines.

The names below are imported when they are first used, so that `import trainer_kit` costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_kit import callbacks
    from trainer_kit.accelerator import Accelerator, ProjectConfiguration, set_seed
    from trainer_kit.arguments import TrainingArguments
    from trainer_kit.callback import Callback, CallbackError
    from trainer_kit.checkpoint import load_checkpoint_in_model
    from trainer_kit.evaluation import EvalPrediction, PredictionOutput
    from trainer_kit.figures import NonFiniteError
    from trainer_kit.launch.config import write_basic_config
    from trainer_kit.launch.notebook import notebook_launcher
    from trainer_kit.planning import TrainingPlan
    from trainer_kit.precision import Precision
    from trainer_kit.run import Run
    from trainer_kit.run_lock import FolderInUseError
    from trainer_kit.saving import SaveError
    from trainer_kit.state import Requests, Stateful, TrainState
    from trainer_kit.strategies.base import Strategy
    from trainer_kit.strategies.ddp import DDP
    from trainer_kit.strategies.multinode import MultiNode
    from trainer_kit.strategies.single import SingleDevice
    from trainer_kit.strategies.xla import XLA
    from trainer_kit.summary import print_summary
    from trainer_kit.trainer import Trainer, TrainOutput

__version__ = "0.1.0.dev0"

__all__ = [
    "DDP",
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
    "callbacks",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "print_summary",
    "set_seed",
    "write_basic_config",
]

_HOMES = {
    "Accelerator": "accelerator",
    "Callback": "callback",
    "CallbackError": "callback",
    "DDP": "strategies.ddp",
    "EvalPrediction": "evaluation",
    "MultiNode": "strategies.multinode",
    "NonFiniteError": "figures",
    "Precision": "precision",
    "PredictionOutput": "evaluation",
    "ProjectConfiguration": "accelerator",
    "Requests": "state",
    "Run": "run",
    "FolderInUseError": "run_lock",
    "SaveError": "saving",
    "SingleDevice": "strategies.single",
    "Stateful": "state",
    "Strategy": "strategies.base",
    "TrainOutput": "trainer",
    "TrainState": "state",
    "Trainer": "trainer",
    "TrainingArguments": "arguments",
    "TrainingPlan": "planning",
    "XLA": "strategies.xla",
    "load_checkpoint_in_model": "checkpoint",
    "notebook_launcher": "launch.notebook",
    "print_summary": "summary",
    "set_seed": "accelerator",
    "write_basic_config": "launch.config",
}


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return importlib.import_module(f"{__name__}.callbacks")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

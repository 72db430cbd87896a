"""`Accelerator`: trainer_kit's hardware support and checkpoints for a hand-written loop, under accelerate's names.

accelerate's other names are where it has them: in `trainer_kit.accelerator.utils`, `.state`, `.logging`, `.tracking`,
`.data_loader`, `.local_sgd` and `.big_modeling`.
"""

from typing import Any

from trainer_kit.accelerator import foreign_names
from trainer_kit.accelerator.accelerator import Accelerator
from trainer_kit.accelerator.big_modeling import init_empty_weights, init_on_device, load_checkpoint_and_dispatch
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.local_sgd import LocalSGD
from trainer_kit.accelerator.logging import get_logger
from trainer_kit.accelerator.skip import skip_first_batches
from trainer_kit.accelerator.state import AcceleratorState, GradientState, PartialState
from trainer_kit.accelerator.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from trainer_kit.accelerator.utils.memory import find_executable_batch_size
from trainer_kit.accelerator.utils.random import set_seed, synchronize_rng_states
from trainer_kit.accelerator.wrappers import PreparedOptimizer, PreparedScheduler
from trainer_kit.checkpoint import load_checkpoint_in_model
from trainer_kit.launch.notebook import notebook_launcher

__version__ = "1.15.0"
"""Version of accelerate whose names these are, since scripts compare it."""

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "PartialState",
    "PreparedLoader",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "__version__",
    "find_executable_batch_size",
    "get_logger",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> Any:
    return foreign_names.find("", name)


foreign_names.install()

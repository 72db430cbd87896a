"""`Accelerator`: trainer_kit's hardware support and checkpoints for a hand-written loop, under accelerate's names."""

from trainer_kit.accelerator.accelerator import Accelerator
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.options import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
)
from trainer_kit.accelerator.skip import skip_first_batches
from trainer_kit.accelerator.wrappers import PreparedOptimizer, PreparedScheduler

__all__ = [
    "Accelerator",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PreparedLoader",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProjectConfiguration",
    "set_seed",
    "skip_first_batches",
]

"""What an `Accelerator` can be told beside its plain arguments, and `set_seed`."""

from __future__ import annotations

import dataclasses
import enum
import os
import random
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from trainer_kit.config import environment


class DistributedType(str, enum.Enum):
    """What a run is spread over, as `Accelerator.distributed_type` tells it."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    TPU = "XLA"


@dataclasses.dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    Args:
        project_dir: Folder of the run; `save_state` without a folder writes to `project_dir/checkpoints/checkpoint_N`.
        logging_dir: Folder of the trackers' files; None: `project_dir`.
        automatic_checkpoint_naming: Gives `save_state` such folders also where it is told one.
        total_limit: How many of these checkpoints stay; None keeps all.
        iteration: Number of the first one, unless there are some already.

    Raises:
        ValueError: If `total_limit` or `iteration` makes no sense.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit={self.total_limit} keeps no checkpoint; use None to keep all, or at least 1")
        if self.iteration < 0:
            raise ValueError(f"iteration={self.iteration} is negative; checkpoints are numbered from 0")


@dataclasses.dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Args:
        num_steps: Batches of one optimizer step on each process.
        adjust_scheduler: Without effect, as in accelerate: accumulated batches never count as steps of a schedule.
        sync_with_dataloader: Whether a loader's last batch ends a step, also where that is short.
        sync_each_batch: Whether each batch's gradients are exchanged at once; takes time, and saves memory where they
            are sharded.

    Raises:
        ValueError: If `num_steps` is below 1.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={self.num_steps} must be at least 1")


@dataclasses.dataclass
class DataLoaderConfiguration:
    """How prepared loaders deal out their batches.

    Args:
        split_batches: A loader's batch size is that of all processes together; by default it is that of each.
    """

    split_batches: bool = False


@dataclasses.dataclass(kw_only=True)
class DistributedDataParallelKwargs:
    """Arguments of torch's DistributedDataParallel, see `trainer_kit.DDP`; without effect in a single process."""

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: int | None = None


@dataclasses.dataclass(kw_only=True)
class InitProcessGroupKwargs:
    """How the processes meet; `timeout` is how long one waits for the others in a collective."""

    timeout: timedelta = timedelta(minutes=30)


def ddp_options(handlers: Iterable[Any]) -> dict[str, Any]:
    """The arguments of `DDP` that `kwargs_handlers` stand for.

    Raises:
        TypeError: If one of them is of another kind.
    """
    options: dict[str, Any] = {}
    for handler in handlers:
        if isinstance(handler, DistributedDataParallelKwargs):
            options |= dataclasses.asdict(handler)
        elif isinstance(handler, InitProcessGroupKwargs):
            options["ddp_timeout"] = handler.timeout.total_seconds()
        else:
            raise TypeError(
                f"kwargs_handlers holds a {type(handler).__name__}; it takes DistributedDataParallelKwargs and "
                "InitProcessGroupKwargs"
            )
    return options


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python's, numpy's and torch's generators, those of all devices too.

    Args:
        seed: Whole number, not negative. The order of samples in loaders that are prepared afterwards follows from it.
        device_specific: Adds the number of this process, so that each draws other dropout masks.
        deterministic: Lets torch use deterministic algorithms only, which can be slower; see
            `torch.use_deterministic_algorithms`.

    Raises:
        ValueError: If `seed` is negative.
    """
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; use 0 or more")
    if device_specific:
        seed += environment.place().rank
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if "torch_xla" in sys.modules:
        from trainer_kit.strategies.xla.strategy import seed_devices

        seed_devices(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)

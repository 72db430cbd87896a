"""Configuration objects of an `Accelerator`, and `set_seed`."""

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
    """Kind of devices that a run is distributed over, as in `Accelerator.distributed_type`."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"


@dataclasses.dataclass
class ProjectConfiguration:
    """Folders and checkpoint retention of a run.

    Args:
        project_dir: Folder of the run; `save_state` without a folder writes to `project_dir/checkpoints/checkpoint_N`.
        logging_dir: Folder of the trackers' files; None for `project_dir`.
        automatic_checkpoint_naming: Whether `save_state` uses such folders even if it is given a folder.
        total_limit: Number of these checkpoints to keep; None keeps all.
        iteration: Number of the first one, unless the folder already holds some.

    Raises:
        ValueError: If `total_limit` is below 1 or `iteration` is negative.
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
    """Settings of gradient accumulation.

    Args:
        num_steps: Batches per optimizer step on each process.
        adjust_scheduler: Without effect, as in accelerate: accumulated batches never count as scheduler steps.
        sync_with_dataloader: Whether a loader's last batch ends a step, even if fewer batches were accumulated.
        sync_each_batch: Whether to all-reduce the gradients of each batch; takes time, and saves memory where gradients
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
    """Settings of prepared loaders.

    Args:
        split_batches: Whether a loader's batch size is that of all processes together, instead of each process's.
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
    """Arguments of the process group; `timeout` limits how long a process waits in a collective."""

    timeout: timedelta = timedelta(minutes=30)


@dataclasses.dataclass(kw_only=True)
class FullyShardedDataParallelPlugin:
    """Options of a model that is sharded over the processes, see `trainer_kit.FSDP`.

    Args:
        fsdp_version: Only 2, torch's `fully_shard`.
        reshard_after_forward: See `trainer_kit.FSDP`.
        cpu_offload: See `trainer_kit.FSDP(offload=)`.
        transformer_cls_names_to_wrap: Class names of the modules that are gathered as one; None: the blocks that the
            model repeats.

    Raises:
        ValueError: If `fsdp_version` is not 2.
    """

    fsdp_version: int = 2
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    transformer_cls_names_to_wrap: list[str] | None = None

    def __post_init__(self) -> None:
        if self.fsdp_version != 2:
            raise ValueError(f"fsdp_version={self.fsdp_version!r} is not available; use 2, torch's fully_shard")

    def options(self) -> dict[str, Any]:
        """Return the arguments of `FSDP`."""
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "offload": self.cpu_offload,
            "units": self.transformer_cls_names_to_wrap,
        }


def ddp_options(handlers: Iterable[Any]) -> dict[str, Any]:
    """Return the arguments of `DDP` that `kwargs_handlers` set.

    Args:
        handlers: `DistributedDataParallelKwargs` and `InitProcessGroupKwargs`.

    Returns:
        Arguments of `DDP` by name.

    Raises:
        TypeError: If a handler is of another type.
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
    """Seed the generators of Python, numpy and torch, including those of all devices.

    Args:
        seed: Nonnegative whole number. It also sets the order of samples in loaders that are prepared later.
        device_specific: Whether to add the rank, so that each process draws different dropout masks.
        deterministic: Whether torch uses deterministic algorithms only, which can be slower; see
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

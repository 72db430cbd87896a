"""Facts about this process that a launcher left in the environment: the one place that reads such variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

# What torch, its libraries and its backends are set up with.
_SETTING_PREFIXES = (
    "CUDA_", "GLOO_", "MASTER_", "MKL_", "NCCL_", "OMPI_COMM_", "OMP_", "PJRT_", "PYTORCH_", "SLURM_STEP_", "TORCH_",
    "TPU_", "TRAINER_KIT_", "XLA_",
)  # fmt: skip
_SETTINGS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID",
    "SLURM_NODEID", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
)  # fmt: skip

# What `trainer-kit launch` and `notebook_launcher` tell the processes that they start.
MIXED_PRECISION = "TRAINER_KIT_MIXED_PRECISION"
USE_CPU = "TRAINER_KIT_USE_CPU"
PROGRESS_FILE = "TRAINER_KIT_PROGRESS_FILE"
DEBUG = ("TRAINER_KIT_DEBUG", "ACCELERATE_DEBUG_MODE")


class Place(NamedTuple):
    """Which of a run's processes this is.

    Attributes:
        rank: Number of this process among all, from 0.
        world_size: Processes in all.
        local_rank: Number of this process on its machine, from 0.
        local_world_size: Processes on this machine.
        node: Number of this machine, from 0.
        address: Name or number of the machine of rank 0, for the rendezvous.
        port: Its port.
        restarts: How often the launcher has started these processes anew.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    restarts: int = 0

    @property
    def has_several_machines(self) -> bool:
        """Whether some processes are on other machines."""
        return self.local_world_size < self.world_size


def place() -> Place:
    """This process among those that a launcher started: torchrun, SLURM's srun or Open MPI's mpirun.

    A process that nobody started beside others is rank 0 of 1.

    Raises:
        ValueError: If a launcher's variable is missing or holds no whole number, naming it.
    """
    restarts = sum(_number(name, default=0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    for name, read in _LAUNCHERS.items():
        if name in os.environ:
            world_size = _number(name, least=1)
            place = read(world_size) if world_size > 1 else Place()
            return place._replace(restarts=restarts)
    return Place(restarts=restarts)


def _of_torchrun(world_size: int) -> Place:
    local_world_size = _number("LOCAL_WORLD_SIZE", default=world_size, least=1)
    rank = _number("RANK")
    return Place(
        rank,
        world_size,
        _number("LOCAL_RANK"),
        local_world_size,
        _number("GROUP_RANK", default=rank // local_world_size),
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        _number("MASTER_PORT", default=29500),
    )


def _of_slurm(world_size: int) -> Place:
    node = _number("SLURM_NODEID")
    job = _number("SLURM_JOB_ID", default=0) + _number("SLURM_STEP_ID", default=0)
    # Ports below 32768 are not given out by the system; two steps of a job get two of them.
    port = _number("MASTER_PORT", default=15000 + job % 15000)
    return Place(
        _number("SLURM_PROCID"),
        world_size,
        _number("SLURM_LOCALID"),
        _tasks_of(os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)), node),
        node,
        os.environ.get("MASTER_ADDR") or first_host(os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        port,
    )


def _of_open_mpi(world_size: int) -> Place:
    rank, local = _number("OMPI_COMM_WORLD_RANK"), _number("OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    if local < world_size and "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "mpirun started processes on several machines, but the environment variable MASTER_ADDR is not set; give "
            "mpirun -x MASTER_ADDR=<the machine of rank 0> -x MASTER_PORT=<a free port>"
        )
    job = os.environ.get("PMIX_NAMESPACE") or os.environ.get("OMPI_MCA_ess_base_jobid") or ""  # noqa: SIM112
    port = _number("MASTER_PORT", default=15000 + int("".join(re.findall(r"\d", job)) or 0) % 15000)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return Place(rank, world_size, _number("OMPI_COMM_WORLD_LOCAL_RANK"), local, rank // local, address, port)


# In this order: torchrun may itself be a task of SLURM.
_LAUNCHERS: dict[str, Callable[[int], Place]] = {
    "WORLD_SIZE": _of_torchrun,
    "SLURM_STEP_NUM_TASKS": _of_slurm,
    "OMPI_COMM_WORLD_SIZE": _of_open_mpi,
}


def _number(name: str, default: int | None = None, least: int = 0) -> int:
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(
            f"a launcher started several processes, but the environment variable {name} is missing; set it"
        )
    if not value.isdecimal() or int(value) < least:
        kind = "positive whole number" if least else "whole number"
        raise ValueError(f"the environment variable {name}={value!r} is no {kind}; unset it")
    return int(value)


def _tasks_of(spread: str, node: int) -> int:
    """Tasks of one node in SLURM's notation: "2(x3),1" is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in spread.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"the environment variable SLURM_STEP_TASKS_PER_NODE={spread!r} cannot be read; unset it")
        tasks += [int(match[1])] * int(match[2] or 1)
    if node >= len(tasks):
        raise ValueError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={spread!r} names {len(tasks)} machines")
    return tasks[node]


def first_host(nodes: str) -> str:
    """The first machine of a list in SLURM's notation: "gpu[07-09,12],cpu1" begins with gpu07."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"the environment variable SLURM_STEP_NODELIST={nodes!r} cannot be read; set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")


def slurm_job() -> str | None:
    """The number of the SLURM job that this process belongs to; None outside one."""
    return os.environ.get("SLURM_JOB_ID")


def mixed_precision() -> str:
    """What the launcher was told to compute in; "no" where it was not told."""
    return os.environ.get(MIXED_PRECISION, "no")


def use_cpu() -> bool:
    """Whether the launcher was told to train on the CPU."""
    return os.environ.get(USE_CPU, "") in ("1", "true", "yes")


def debug() -> bool:
    """Whether launchers shall try a child process before they start the run."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in DEBUG)


def progress_file() -> str | None:
    """Where the launcher wants to be told of the newest checkpoint's step; None where it does not ask."""
    return os.environ.get(PROGRESS_FILE)


def settings() -> dict[str, str]:
    """The variables that change how torch and a run behave, for a bug report (never one that may hold a secret)."""
    return {key: value for key, value in os.environ.items() if key in _SETTINGS or key.startswith(_SETTING_PREFIXES)}

"""Facts about this process that a launcher left in the environment: the one place that reads such variables."""

from __future__ import annotations

import os

# The launchers' names for the number of processes: torchrun, SLURM's srun, Open MPI's mpirun.
_WORLD_SIZE_NAMES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# What torch, its libraries and its backends are set up with.
_SETTING_PREFIXES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PJRT_", "PYTORCH_", "TORCH_", "TPU_", "XLA_")


def world_size() -> int:
    """The number of processes that a launcher started for this run (1 where none did).

    Raises:
        ValueError: If a launcher's variable holds no positive whole number.
    """
    for name in _WORLD_SIZE_NAMES:
        value = os.environ.get(name)
        if value is None:
            continue
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"the environment variable {name}={value!r} is no positive whole number; unset it")
        return int(value)
    return 1


def settings() -> dict[str, str]:
    """The variables that change how torch and a run behave, for a bug report (never one that may hold a secret)."""
    names = (*_WORLD_SIZE_NAMES, "RANK", "LOCAL_RANK", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
    return {key: value for key, value in os.environ.items() if key in names or key.startswith(_SETTING_PREFIXES)}

"""Facts about this process that a launcher left in the environment: the one place that reads such variables."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# What torch, its libraries and its backends are set up with.
_SETTING_PREFIXES = (
    "CUDA_", "GLOO_", "LIBTPU_", "MASTER_", "MEGASCALE_", "MKL_", "NCCL_", "OMPI_COMM_", "OMP_", "PJRT_", "PYTORCH_",
    "SLURM_STEP_", "TORCH_", "TPU_", "TRAINER_KIT_", "XLA_",
)  # fmt: skip
_SETTINGS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID",
    "SLURM_NODEID", "CPU_NUM_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
)  # fmt: skip

# What `trainer-kit launch` and `notebook_launcher` tell the processes that they start.
MIXED_PRECISION = "TRAINER_KIT_MIXED_PRECISION"
USE_CPU = "TRAINER_KIT_USE_CPU"
PROFILE = "TRAINER_KIT_PROFILE"
USE_TPU = "TRAINER_KIT_USE_TPU"
PROGRESS_FILE = "TRAINER_KIT_PROGRESS_FILE"
DEBUG = ("TRAINER_KIT_DEBUG", "ACCELERATE_DEBUG_MODE")

# How TPU chips show themselves on the PCI bus, and how many devices XLA sees in one of each kind: v2 and v3 have two
# cores a chip. The numbers are those of torch_xla/_internal/tpu.py.
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_DEVICES_OF_CHIP = {
    "0x0027": 2, "0x0056": 1, "0x005e": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 1,
}  # fmt: skip

# What XLA can drive for us. Others that PJRT_DEVICE may name have something better (CUDA) or were never tried.
XLA_DEVICE_TYPES = ("TPU", "CPU")


ONE_TPU_CHIP = {"TPU_VISIBLE_CHIPS": "0", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
"""What keeps a process to the first TPU chip of its machine."""


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

    On a TPU of several hosts, where there is one process on each, it is this host among those that GKE or the TPU VM's
    metadata name. Any other process that nobody started beside others is rank 0 of 1.

    Raises:
        ValueError: If a launcher's variable is missing, holds no whole number, or contradicts another, naming it.
    """
    restarts = sum(_number(name, default=0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    place = Place()
    for name, read in _LAUNCHERS.items():
        if name in os.environ:
            world_size = _number(name, least=1)
            place = read(world_size) if world_size > 1 else Place()
            break
    if place.world_size == 1:
        place = tpu_host()
    return place._replace(restarts=restarts)


def launcher() -> str | None:
    """The variable by which a launcher tells how many processes there are, as NAME=VALUE; None where there is none."""
    name = next((name for name in _LAUNCHERS if name in os.environ), None)
    return None if name is None else f"{name}={os.environ[name]}"


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


def tpu_host() -> Place:
    """This host among those of a TPU slice, one process on each; rank 0 of 1 where it is alone or has no TPU.

    Raises:
        ValueError: If the variables that name the hosts contradict one another.
    """
    is_one_chip = os.environ.get("TPU_PROCESS_BOUNDS") == ONE_TPU_CHIP["TPU_PROCESS_BOUNDS"]
    if is_one_chip or xla_device_type() != "TPU":
        return Place()
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if hosts or "TPU_SKIP_MDS_QUERY" in os.environ or not _tpu_chips():
        rank = _number("TPU_WORKER_ID") if len(hosts) > 1 else 0
    else:
        # "name:number:address" each
        hosts = [entry.split(":")[2] for entry in _metadata("worker-network-endpoints").split(",") if entry]
        rank = int(_metadata("agent-worker-number") or 0)
    if len(hosts) < 2:
        return Place()
    _check_tpu_hosts(len(hosts), rank)
    return Place(rank, len(hosts), 0, 1, rank, hosts[0], _number("MASTER_PORT", default=29500))


def _check_tpu_hosts(hosts: int, rank: int) -> None:
    addresses, slices = os.environ.get("TPU_PROCESS_ADDRESSES"), _number("MEGASCALE_NUM_SLICES", default=1, least=1)
    if rank >= hosts:
        raise ValueError(f"TPU_WORKER_ID={rank}, but there are {hosts} TPU hosts; the first has the number 0")
    if addresses is not None and len(addresses.split(",")) != hosts:
        raise ValueError(
            f"TPU_PROCESS_ADDRESSES names {len(addresses.split(','))} processes for {hosts} TPU hosts, but one process "
            "drives all devices of its host; name one for each host, or unset it"
        )
    if slices > 1:
        raise ValueError(f"MEGASCALE_NUM_SLICES={slices} joins TPU slices, but a run takes one slice; start it on one")


@functools.cache
def _metadata(name: str) -> str:
    """What Google's metadata server says of this machine; empty where it does not answer."""
    import urllib.request  # takes its time

    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with directly.open(urllib.request.Request(address, headers={"Metadata-Flavor": "Google"}), timeout=3) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


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


def profile() -> str | None:
    """The steps that the launcher was told to profile; None where it was not told."""
    return os.environ.get(PROFILE) or None


def use_tpu() -> bool:
    """Whether the launcher was told to train on XLA's devices (`--tpu`)."""
    return os.environ.get(USE_TPU, "") in ("1", "true", "yes")


def xla_device_type() -> str | None:
    """Which devices XLA would drive for strategy "auto", found without torch_xla; None: do not take XLA.

    "TPU" where PJRT_DEVICE names it, or is not set and there is a TPU on this machine's PCI bus, or the launcher was
    told `--tpu`. "CPU", which is XLA's own CPU client for trying a script without a TPU, where PJRT_DEVICE names it; a
    GPU goes before it, because torch_xla itself sets PJRT_DEVICE=CPU when any package imports it and there is no TPU.
    None for PJRT_DEVICE=CUDA, because torch drives GPUs by itself, where the launcher was told to use the CPU, where
    nothing names a device, and where torch_xla is not installed.
    """
    if use_cpu() or not has_torch_xla():
        return None
    named = pjrt_device()
    if named is None:
        return "TPU" if use_tpu() or _tpu_chips() else None
    if named not in XLA_DEVICE_TYPES or (named == "CPU" and not use_tpu() and _has_gpu()):
        return None
    return named


def has_torch_xla() -> bool:
    """Whether torch_xla is installed; it is not imported."""
    return importlib.util.find_spec("torch_xla") is not None


def pjrt_device() -> str | None:
    """The type of device that PJRT_DEVICE names, such as "TPU"; None where it is not set."""
    return os.environ.get("PJRT_DEVICE", "").partition("_")[0] or None


def xla_devices(device_type: str) -> int:
    """XLA's devices of this machine, counted without starting its runtime; 0 where no TPU is found.

    Args:
        device_type: "TPU" or "CPU".

    Raises:
        ValueError: If CPU_NUM_DEVICES holds no positive whole number.
    """
    if device_type == "CPU":
        return _number("CPU_NUM_DEVICES", default=1, least=1)
    chips, visible = _tpu_chips(), os.environ.get("TPU_VISIBLE_CHIPS", "")
    return sum(chips[: len(visible.split(","))] if visible else chips)


def _tpu_chips() -> list[int]:
    """XLA's devices in each TPU chip of this machine."""
    googles = [vendor.parent for vendor in _PCI_DEVICES.glob("*/vendor") if vendor.read_text().strip() == _GOOGLE]
    numbers = [(folder / "device").read_text().strip() for folder in googles]
    return [_DEVICES_OF_CHIP[number] for number in numbers if number in _DEVICES_OF_CHIP]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0  # unlike is_available() it does not start the driver


def check_drives_machine_alone() -> None:
    """Makes sure that no other process was started for the XLA devices of this machine.

    Raises:
        ValueError: If a launcher such as torchrun started several: each would train by itself on what it got. Also if
            it started one on each of several machines that only a TPU could join.
    """
    here = place()
    if here.local_world_size > 1:
        raise ValueError(
            f"a launcher started {here.local_world_size} processes on this machine, but one process drives all of its "
            "XLA devices, and each of these would train alone; start the script with `trainer-kit launch --tpu "
            "script.py` or plainly with `python script.py`"
        )
    if here.has_several_machines and pjrt_device() == "CPU":
        raise ValueError(
            f"a launcher started processes on {here.world_size} machines, but XLA joins machines on TPUs alone, and "
            "with PJRT_DEVICE=CPU each would train alone; start the script on one machine"
        )


def debug() -> bool:
    """Whether launchers shall try a child process before they start the run."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in DEBUG)


def progress_file() -> str | None:
    """Where the launcher wants to be told of the newest checkpoint's step; None where it does not ask."""
    return os.environ.get(PROGRESS_FILE)


def settings() -> dict[str, str]:
    """The variables that change how torch and a run behave, for a bug report (never one that may hold a secret)."""
    return {key: value for key, value in os.environ.items() if key in _SETTINGS or key.startswith(_SETTING_PREFIXES)}

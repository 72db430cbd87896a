"""Environment variables of launchers and devices; no other module reads them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from trainer_kit.utils.membership_claim import MembershipPlace

# Variables that configure torch, its libraries and its backends.
_SETTING_PREFIXES = (
    "CUDA_", "GLOO_", "LIBTPU_", "MASTER_", "MEGASCALE_", "MKL_", "NCCL_", "OMPI_COMM_", "OMP_", "PJRT_", "PYTORCH_",
    "SLURM_STEP_", "TORCH_", "TPU_", "TRAINER_KIT_", "XLA_",
)  # fmt: skip
_SETTINGS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID",
    "SLURM_NODEID", "CPU_NUM_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM",
)  # fmt: skip

# Variables that `trainer-kit launch` and `notebook_launcher` set for their processes.
MIXED_PRECISION = "TRAINER_KIT_MIXED_PRECISION"
USE_CPU = "TRAINER_KIT_USE_CPU"
PROFILE = "TRAINER_KIT_PROFILE"
USE_TPU = "TRAINER_KIT_USE_TPU"
FSDP = "TRAINER_KIT_FSDP"
ACCUMULATION = "TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS"
DYNAMO_BACKEND = "TRAINER_KIT_DYNAMO_BACKEND"
PROGRESS_FILE = "TRAINER_KIT_PROGRESS_FILE"
ELASTIC = "TRAINER_KIT_ELASTIC"
MEMBERSHIP = "TRAINER_KIT_MEMBERSHIP"
REGROUP_FOLDER = "TRAINER_KIT_REGROUP_FOLDER"
NEWCOMER = "TRAINER_KIT_NEWCOMER"
CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
DEBUG = ("TRAINER_KIT_DEBUG", "ACCELERATE_DEBUG_MODE")

# PCI device IDs of TPU chips, and the number of XLA devices in each: v2 and v3 chips have two cores. The IDs are
# those of torch_xla/_internal/tpu.py.
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_DEVICES_OF_CHIP = {
    "0x0027": 2, "0x0056": 1, "0x005e": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 1,
}  # fmt: skip

# Supported values of PJRT_DEVICE; other devices have a better strategy (CUDA) or are untested.
XLA_DEVICE_TYPES = ("TPU", "CPU")

ONE_TPU_CHIP = {"TPU_VISIBLE_CHIPS": "0", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
"""Variables that restrict a process to the first TPU chip of its machine."""


class Place(NamedTuple):
    """Place of this process among the processes of a run.

    Attributes:
        rank: Rank of this process among all processes, from 0.
        world_size: Number of processes.
        local_rank: Rank of this process on its machine, from 0.
        local_world_size: Number of processes on this machine.
        node: Number of this machine, from 0.
        address: Host name or IP address of rank 0's machine, for the rendezvous.
        port: Port of the rendezvous.
        restarts: Number of times that the launcher has restarted these processes.
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
        """Whether other machines run processes of the run too."""
        return self.local_world_size < self.world_size


def place() -> Place:
    """Return the place of this process, as torchrun, SLURM's srun or Open MPI's mpirun set it.

    On a TPU with several hosts and one process each, it is this host's place among those that GKE or the TPU VM's
    metadata name. In all other cases it is rank 0 of 1.

    Raises:
        ValueError: If a launcher's variable is missing, is no whole number, or contradicts another one.
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
    """Return the launcher's variable for the number of processes, as NAME=VALUE; None without a launcher."""
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
    # The system assigns no ports below 32768; two steps of a job get different ports.
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
    """Return this host's place in a TPU slice with one process per host; rank 0 of 1 for one host or without a TPU.

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
        # each entry is "name:number:address"
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
    """Return an attribute of this machine from Google's metadata server; empty if it does not answer."""
    import urllib.request  # slow to import

    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with directly.open(urllib.request.Request(address, headers={"Metadata-Flavor": "Google"}), timeout=3) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


# Checked in this order, since torchrun may run inside a SLURM task.
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
    """Return the number of tasks of one node from SLURM's notation: "2(x3),1" is 2, 2, 2, 1."""
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
    """Return the first host of a list in SLURM's notation: gpu07 of "gpu[07-09,12],cpu1".

    Raises:
        ValueError: If the list cannot be parsed.
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"the environment variable SLURM_STEP_NODELIST={nodes!r} cannot be read; set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")


def slurm_job() -> str | None:
    """Return the ID of this process's SLURM job; None outside a job."""
    return os.environ.get("SLURM_JOB_ID")


def submitit_signal() -> str | None:
    """Return the name of the signal by which submitit requeues this process's job; None outside its jobs."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return None
    return "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")


def variable(name: str) -> str | None:
    """Return the value of any environment variable; None without it."""
    return os.environ.get(name)


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Remove all environment variables within the block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def mixed_precision() -> str:
    """Return the mixed precision that the launcher requests; "no" by default."""
    return os.environ.get(MIXED_PRECISION, "no")


def gradient_accumulation_steps() -> int:
    """Return the batches per optimizer step that the launcher requests of an Accelerator; 1 by default."""
    return _number(ACCUMULATION, 1, least=1) or 1


def dynamo_backend() -> str:
    """Return the compiler that the launcher requests of an Accelerator; "NO" by default."""
    return os.environ.get(DYNAMO_BACKEND, "NO")


def use_cpu() -> bool:
    """Return whether the launcher requests training on the CPU."""
    return os.environ.get(USE_CPU, "") in ("1", "true", "yes")


def profile() -> str | None:
    """Return the steps that the launcher requests to profile, such as "10:20"; None without a request."""
    return os.environ.get(PROFILE) or None


def use_tpu() -> bool:
    """Return whether the launcher requests training on XLA devices (`--tpu`)."""
    return os.environ.get(USE_TPU, "") in ("1", "true", "yes")


def fsdp() -> bool:
    """Return whether the launcher requests a sharded model (`--fsdp`)."""
    return os.environ.get(FSDP, "") in ("1", "true", "yes")


def xla_device_type() -> str | None:
    """Return the type of device that strategy "auto" uses through XLA, found without importing torch_xla.

    Returns:
        "TPU" if PJRT_DEVICE names it, or if PJRT_DEVICE is not set and this machine has a TPU on its PCI bus or the
        launcher was started with `--tpu`.
        "CPU", XLA's CPU client for tests without a TPU, if PJRT_DEVICE names it and either there is no GPU or the
        launcher was started with `--tpu`. (torch_xla sets PJRT_DEVICE=CPU itself when it is imported without a TPU.)
        None, which means not to use XLA, in all other cases: for PJRT_DEVICE=CUDA, if the launcher requests the CPU, or
        if torch_xla is not installed.
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
    """Return whether torch_xla is installed, without importing it."""
    return importlib.util.find_spec("torch_xla") is not None


def pjrt_device() -> str | None:
    """Return the type of device in PJRT_DEVICE, such as "TPU"; None if it is not set."""
    return os.environ.get("PJRT_DEVICE", "").partition("_")[0] or None


def xla_devices(device_type: str) -> int:
    """Return the number of XLA devices of this machine, without starting XLA's runtime; 0 without a TPU.

    Args:
        device_type: "TPU" or "CPU".

    Raises:
        ValueError: If CPU_NUM_DEVICES is no positive whole number.
    """
    if device_type == "CPU":
        return _number("CPU_NUM_DEVICES", default=1, least=1)
    chips, visible = _tpu_chips(), os.environ.get("TPU_VISIBLE_CHIPS", "")
    return sum(chips[: len(visible.split(","))] if visible else chips)


def _tpu_chips() -> list[int]:
    """Return the number of XLA devices in each TPU chip of this machine."""
    googles = [vendor.parent for vendor in _PCI_DEVICES.glob("*/vendor") if vendor.read_text().strip() == _GOOGLE]
    numbers = [(folder / "device").read_text().strip() for folder in googles]
    return [_DEVICES_OF_CHIP[number] for number in numbers if number in _DEVICES_OF_CHIP]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0  # unlike is_available(), does not initialize the driver


def check_drives_machine_alone() -> None:
    """Check that this process alone drives the XLA devices of its machine.

    Raises:
        ValueError: If a launcher started several processes on this machine, or processes on several machines with
            PJRT_DEVICE=CPU; each would train alone.
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
    """Return whether launchers test a child process before they start the run."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in DEBUG)


def quiet_cpp_logs() -> None:
    """Let torch's C++ code log errors only, unless the user has chosen: a lost store gives dozens of lines."""
    os.environ.setdefault(CPP_LOG_LEVEL, "ERROR")


def is_elastic() -> bool:
    """Return whether the launcher continues without machines that are lost, and takes in those that come."""
    return os.environ.get(ELASTIC) == "1"


def membership() -> MembershipPlace | None:
    """Return the membership of this start; None if the run is not elastic."""
    text = os.environ.get(MEMBERSHIP, "")
    if not text:
        return None
    run, number, after, needs_claim = text.split("/")
    return MembershipPlace(run, int(number), int(after), needs_claim == "1")


def take_place(variables: Mapping[str, str]) -> None:
    """Set the variables of a new place of this process, which the launcher has given."""
    os.environ.pop(NEWCOMER, None)
    os.environ.update(variables)


def is_newcomer() -> bool:
    """Return whether this process prepares a training alone, to join it on others; `place` is what it can expect."""
    return os.environ.get(NEWCOMER) == "1"


def regroup_folder() -> str | None:
    """Return the folder in which a process asks its launcher for a new place; None if the launcher gives none."""
    return os.environ.get(REGROUP_FOLDER)


def progress_file() -> str | None:
    """Return the path of the launcher's file for the newest checkpoint's step; None if the launcher needs none."""
    return os.environ.get(PROGRESS_FILE)


def settings() -> dict[str, str]:
    """Return the variables that affect torch and a run, for a bug report, from a list without secrets."""
    return {key: value for key, value in os.environ.items() if key in _SETTINGS or key.startswith(_SETTING_PREFIXES)}


def has_expandable_segments() -> bool:
    """Return whether torch's allocator of GPU memory is configured with expandable segments."""
    settings = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)

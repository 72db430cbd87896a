"""`LaunchConfig`: what to start on which machines, and the file that stores the user's choice."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer_kit.config import environment
from trainer_kit.config.field_types import Interval
from trainer_kit.config.validation import Rule, check_names, check_values, load_fields, save_fields
from trainer_kit.launch.accelerate_config import from_accelerate, is_of_accelerate
from trainer_kit.launch.restart_limit import RestartLimit
from trainer_kit.utils.units import format_count

logger = logging.getLogger("trainer_kit")

DEFAULT_PORT = 29500

# Field names of torchrun and accelerate whose spelling differs from ours.
_NAMED_OTHERWISE = {
    "nproc_per_node": "num_processes",
    "nnodes": "num_nodes",
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "use_cpu": "cpu",
}

_RENDEZVOUS = {
    "static": ("timeout", "rank"),
    "c10d": (
        "timeout", "join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "is_host",
        "close_timeout", "heartbeat_timeout", "read_timeout",
    ),
}  # fmt: skip
"""What `rdzv_conf` may hold, by backend; values are whole numbers, as for torchrun."""

_Count = Annotated[int, Rule("a whole number of at least 1", lambda value: value >= 1)]
_Number = Annotated[int, Rule("a whole number of at least 0", lambda value: value >= 0)]
_Seconds = Annotated[float, Rule("a number of seconds above 0", lambda value: value > 0)]
_Port = Annotated[int, Rule("a port from 0 to 65535", lambda value: 0 <= value <= 65535)]
_Word = Annotated[str, Rule("a word without spaces", lambda value: bool(value) and not any(map(str.isspace, value)))]


@dataclasses.dataclass(kw_only=True)
class LaunchConfig:
    """Launch configuration, validated when it is created.

    Attributes:
        num_processes: Number of processes on all machines together, equal on each; None for one per GPU, or one on a
            machine without GPUs. See also `tpu`.
        num_nodes: Number of machines; the largest one with `min_nodes`.
        min_nodes: Smallest number of machines with which the run starts and continues when others are lost; None for
            `num_nodes`. Further machines join while it runs.
        node_rank: Number of this machine, from 0.
        master_addr: Name or address of machine 0, as the other machines reach it. With `min_nodes` several, such as
            "node1,node2,node3": the first one serves the store that machines meet at, and if it is lost, the next one
            that is left.
        master_port: Port of the rendezvous there; 0 for a free one, or 29500 with several machines.
        max_restarts: How often the processes are restarted after a failure, such as 3. Further restarts require that
            the last start has written a newer checkpoint. "5/1h": as long as fewer than 5 failures came before within
            an hour (units s, m, h, d). 0: never. None for 0, or "5/1h" with `min_nodes`, where a machine
            that is lost, joins, or leaves after a signal is no failure.
        rdzv_backend: How machines find one another: "static" by `node_rank`, "c10d" in order of arrival (without
            `node_rank`); `min_nodes` implies "c10d".
        rdzv_id: Name of the run, the same on all machines; None for "trainer_kit".
        rdzv_conf: Options of the rendezvous, by torchrun's names. "timeout" (in "c10d" also "join_timeout"):
            seconds to wait for the other machines, in place of `start_timeout`. With "c10d" also "last_call_timeout",
            in place of `last_call`, "keep_alive_interval" in seconds and "keep_alive_max_attempt": a machine counts as
            gone without that many signs of life (1 and 3); and "is_host": whether this machine serves the store.
            "rank", "close_timeout", "heartbeat_timeout" and "read_timeout" have no effect.
        mixed_precision: Precision of runs whose arguments leave it at "no".
        profile: First and last step to profile, such as "10:20", in runs whose arguments leave it out; None for none.
        cpu: Whether to train on the CPU even if there are GPUs.
        tpu: Whether to train on XLA devices: those that PJRT_DEVICE names, else TPUs. One process drives all devices of
            its machine; `num_processes` then counts devices, and must be all of them or 1 (one chip of a TPU).
        fsdp: Whether runs whose arguments leave `strategy` at "auto" shard the model over the processes.
        gradient_accumulation_steps: Batches per optimizer step of an `Accelerator` whose arguments leave it out.
        dynamo_backend: Compiler of `torch.compile` for an `Accelerator` whose arguments leave it out; "NO": none.
        num_cpu_threads_per_process: Threads of torch in each process, as OMP_NUM_THREADS; None for that variable, else
            an equal share of the processors.
        debug: Whether an `Accelerator` compares shapes before each collective operation.
        monitor_interval: Seconds between two checks of the processes.
        start_timeout: Seconds to wait for the other machines.
        last_call: Seconds to wait at the start for more machines than `min_nodes`.
    """

    num_processes: _Count | None = None
    num_nodes: _Count = 1
    min_nodes: _Count | None = None
    node_rank: _Number = 0
    master_addr: _Word = "127.0.0.1"
    master_port: _Port = 0
    max_restarts: int | str | None = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    rdzv_id: _Word | None = None
    rdzv_conf: dict[str, Any] = dataclasses.field(default_factory=dict)
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = dataclasses.field(
        default_factory=environment.mixed_precision  # type: ignore[arg-type]  # checked like any other value
    )
    profile: Interval | None = dataclasses.field(default_factory=environment.profile)
    cpu: bool = dataclasses.field(default_factory=environment.use_cpu)
    tpu: bool = dataclasses.field(default_factory=environment.use_tpu)
    fsdp: bool = dataclasses.field(default_factory=environment.fsdp)
    gradient_accumulation_steps: _Count = 1
    dynamo_backend: _Word = "NO"
    num_cpu_threads_per_process: _Count | None = None
    debug: bool = dataclasses.field(default_factory=environment.debug)
    monitor_interval: _Seconds = 0.1
    start_timeout: _Seconds = 600.0
    last_call: _Seconds = 3.0

    def __post_init__(self) -> None:
        check_values(self)
        if self.max_restarts is not None:
            RestartLimit.parse(self.max_restarts)
        if self.min_nodes is not None:
            if self.min_nodes >= self.num_nodes:
                raise ValueError(
                    f"min_nodes={self.min_nodes} is not allowed with num_nodes={self.num_nodes}, the largest number of "
                    "machines; give a smaller one, such as --num-nodes 2:4"
                )
            self.rdzv_backend = "c10d"
        if not all(self.candidates) or (len(self.candidates) > 1 and self.min_nodes is None):
            raise ValueError(
                f"master_addr={self.master_addr!r} is not allowed; give one address, or with a range such as "
                "--num-nodes 2:4 several, separated by commas"
            )
        if self.node_rank >= self.num_nodes and self.min_nodes is None:
            raise ValueError(
                f"node_rank={self.node_rank} is not allowed; with num_nodes={self.num_nodes} the machines have the "
                f"numbers 0 to {self.num_nodes - 1}"
            )
        if self.num_processes is not None and self.num_processes % self.num_nodes:
            raise ValueError(
                f"num_processes={self.num_processes} is not allowed with num_nodes={self.num_nodes}; it counts the "
                "processes of all machines, and each machine starts the same number"
            )
        _check_rendezvous(self.rdzv_backend, self.rdzv_conf)
        if self.cpu and self.tpu:
            raise ValueError("cpu=True (--cpu) and tpu=True (--tpu) contradict each other; set one of them")
        if self.fsdp and self.tpu:
            raise ValueError(
                "fsdp=True (--fsdp) and tpu=True (--tpu) contradict each other; on TPUs, give the Trainer "
                "strategy=XLA(fsdp=True)"
            )

    @property
    def candidates(self) -> tuple[str, ...]:
        """Addresses of the machines that can serve the store, in order."""
        return tuple(self.master_addr.split(","))

    @property
    def port(self) -> int:
        """Port of the rendezvous; 0 for a free one."""
        return self.master_port or (DEFAULT_PORT if self.num_nodes > 1 else 0)

    @property
    def meeting_seconds(self) -> float:
        """Seconds to wait for the other machines."""
        return float(self.rdzv_conf.get("join_timeout", self.rdzv_conf.get("timeout", self.start_timeout)))

    @property
    def last_call_seconds(self) -> float:
        """Seconds to wait for more machines than `min_nodes`."""
        return float(self.rdzv_conf.get("last_call_timeout", self.last_call))

    @property
    def sign_seconds(self) -> float:
        """Seconds between two signs of life of a machine."""
        return float(self.rdzv_conf.get("keep_alive_interval", 1))

    @property
    def silence_seconds(self) -> float:
        """Seconds without a sign of life after which a machine counts as gone."""
        return self.sign_seconds * int(self.rdzv_conf.get("keep_alive_max_attempt", 3))

    @property
    def restart_limit(self) -> RestartLimit:
        """Number of failures after which the processes are restarted."""
        default = 0 if self.min_nodes is None else "5/1h"
        return RestartLimit.parse(default if self.max_restarts is None else self.max_restarts)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.rdzv_id or "trainer_kit"

    def local_processes(self) -> int:
        """Return the number of processes to start on this machine.

        Raises:
            ValueError: If it exceeds the number of GPUs, or see `xla_devices`.
            ImportError: See `xla_devices`.
        """
        if self.tpu:
            self.xla_devices()  # raises for an impossible number
            return 1
        gpus = 0 if self.cpu else count_gpus()
        if self.num_processes is None:
            return gpus or 1
        count = self.num_processes // self.num_nodes
        if 0 < gpus < count:
            here = f" makes {count} on each machine" if self.num_nodes > 1 else ""
            raise ValueError(
                f"num_processes={self.num_processes}{here}, but this machine has "
                f"{format_count(gpus, 'GPU')}; use at most {gpus * self.num_nodes}, or cpu=True (--cpu, in a notebook "
                f"{environment.USE_CPU}=1 in os.environ)"
            )
        return count

    @property
    def xla_device_type(self) -> str:
        """Device type that `tpu` trains on: "TPU", or "CPU" for XLA's own CPU client.

        Raises:
            ValueError: If PJRT_DEVICE names any other type.
        """
        named = environment.pjrt_device() or "TPU"
        if named not in environment.XLA_DEVICE_TYPES:
            raise ValueError(f"PJRT_DEVICE={named!r}, but tpu=True (--tpu) trains on 'TPU' or XLA's 'CPU'; unset it")
        return named

    def xla_devices(self) -> int:
        """Return the number of XLA devices that this machine's process drives; 0 where they cannot be counted.

        Raises:
            ValueError: If `num_processes` is neither 1 nor all of them, or PJRT_DEVICE names an unsupported type.
            ImportError: If torch_xla is not installed.
        """
        if not environment.has_torch_xla():
            raise ImportError(
                "tpu=True (--tpu) needs torch_xla; run pip install 'torch~=2.9.0' 'torch-xla[tpu]~=2.9.0'"
            )
        there = environment.xla_devices(self.xla_device_type)
        if self.num_processes in (None, there * self.num_nodes):
            return there
        if self.num_processes == self.num_nodes == 1:
            return 1
        more = "; CPU_NUM_DEVICES makes more of them" if self.xla_device_type == "CPU" else ""
        raise ValueError(
            f"num_processes={self.num_processes} is not allowed; it counts XLA devices, which one process drives, and "
            f"this machine has {there}: leave it out for all, or set it to 1 for a single one{more}"
        )

    def with_tpu(self) -> LaunchConfig:
        """Return a copy with `tpu` set where there is a TPU, and with the machines of a TPU pod where none are given.

        Raises:
            ValueError: If the variables of the TPU's machines contradict one another.
        """
        tpu = self.tpu or environment.xla_device_type() == "TPU"
        host = environment.tpu_host()
        if self.num_nodes > 1 or self.num_processes == 1 or host.world_size == 1:
            return dataclasses.replace(self, tpu=tpu)
        return dataclasses.replace(
            self, tpu=tpu, num_nodes=host.world_size, node_rank=host.node, master_addr=host.address
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return dataclasses.asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all fields to a .yaml, .yml or .json file, and create its folder if missing.

        Args:
            path: Path of the file.

        Raises:
            ValueError: If the name has another ending.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_fields(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LaunchConfig:
        """Read a file that `save`, the user or `accelerate config` wrote; missing fields take their defaults.

        Args:
            path: Path of a .yaml, .yml or .json file.

        Raises:
            FileNotFoundError: If the file does not exist.
            TypeError: If a field is unknown or holds a value of the wrong type; the message begins with the path.
            ValueError: If the name has another ending, the content cannot be read or a value is invalid; the message
                begins with the path.
        """
        values = load_fields(path)
        try:
            if is_of_accelerate(values):
                values = from_accelerate(values)
            check_names(cls, values, _NAMED_OTHERWISE)
            return cls(**values)
        except TypeError as error:
            raise TypeError(f"{os.fspath(path)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _check_rendezvous(backend: str, conf: dict[str, Any]) -> None:
    names = _RENDEZVOUS[backend]
    for name, value in conf.items():
        if name not in names:
            raise ValueError(
                f"rdzv_conf has {name!r}, which rdzv_backend={backend!r} does not know; {', '.join(names)}"
            )
        if name == "is_host":
            is_good, kind = str(value).lower() in ("true", "false", "1", "0"), "True or False"
        else:
            is_good, kind = str(value).isdecimal() and (int(value) > 0 or name == "rank"), "a whole number above 0"
        if not is_good:
            raise ValueError(f"rdzv_conf[{name!r}]={value!r} is not allowed; give {kind}")


def default_path() -> Path:
    """Return the file of `trainer-kit config`: trainer_kit/default_config.yaml in the user's config folder."""
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(settings) / "trainer_kit" / "default_config.yaml"


def write_basic_config(
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration for this machine with all its GPUs, or one process on the CPU, like `trainer-kit config`.

    An existing file stays unchanged, with a warning.

    Args:
        mixed_precision: Precision of runs whose arguments leave it at "no".
        save_location: Path of a .yaml, .yml or .json file; None for the one that `trainer-kit launch` reads
            by default.

    Returns:
        The path of the file; False if it existed already.

    Raises:
        ValueError: If the precision or the file's ending is unknown.
    """
    config = LaunchConfig(mixed_precision=mixed_precision)
    target = default_path() if save_location is None else Path(save_location)
    if target.exists():
        logger.warning(
            "a configuration is saved at %s and stays as it is; remove it, run `trainer-kit config`, or give another "
            "save_location",
            target,
        )
        return False
    config.save(target)
    return target


def count_gpus() -> int:
    """Return the number of GPUs that torch can use, by a query that keeps CUDA usable in a forked process."""
    import torch

    return torch.cuda.device_count() or int(torch.backends.mps.is_available())

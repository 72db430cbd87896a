"""`notebook_launcher`: runs a function of a notebook in several processes.

The processes are forked from the kernel, so that they share all objects of the notebook. If the kernel already uses
CUDA, a forked process could not use it: the processes then start afresh, and get the function and the objects that it
uses in pickled form.

On TPUs (and wherever strategy "auto" selects XLA) one forked process drives all devices, and the kernel never touches
them. A model that the notebook created on the CPU and passes in `args` takes no additional memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal

from trainer_kit.config import environment
from trainer_kit.launch.config import LaunchConfig, count_gpus
from trainer_kit.launch.notebook_state import (
    check_child,
    check_xla_is_free,
    obstacle_to_fork,
    readable,
    wait_for_output,
)
from trainer_kit.launch.payload import PlainStreams, Sent, name_of
from trainer_kit.launch.processes import Logs, run_processes, set_variables, variables
from trainer_kit.utils.units import format_count, pluralize


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no",
    use_port: str | int = "0",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: Literal["static", "c10d"] = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Run `function(*args)` in several processes, from a notebook's cell or a Python session.

    A single process without restarts runs in the kernel. The notebook shows the output of the first process; the
    folder of the others' output is reported. Interrupting the kernel asks them to leave; a second interrupt kills them.

    Args:
        function: Function to run in each process; a Trainer or Accelerator in it finds the other processes by itself.
        args: Arguments of the function.
        num_processes: Number of processes on this machine; None for one per GPU, or one on a machine without GPUs. On
            TPUs it counts devices: all (None) or 1.
        mixed_precision: Precision of runs whose arguments leave it at "no".
        use_port: Port of machine 0 for the rendezvous; "0" for a free one, or 29500 with several machines.
        master_addr: Name or address of machine 0, as the other machines reach it.
        node_rank: Number of this machine, from 0.
        num_nodes: Number of machines; each runs this call in its own notebook.
        rdzv_backend: How machines find one another: "static" by `node_rank`, "c10d" in order of arrival.
        rdzv_endpoint: "host:port" in place of `master_addr` and `use_port`.
        rdzv_conf: Options of the rendezvous, such as {"timeout": 1200} in seconds, see `LaunchConfig`.
        rdzv_id: Name of the run, the same on all machines.
        max_restarts: How often the processes are restarted after a failure, see `LaunchConfig`.
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: Prefix of each line that a process prints; "${rank}", "${local_rank}" and
            "${role_name}" stand for the process's own. All processes are then shown. None: only the first, without it.

    Returns:
        The function's value on rank 0; None on the other machines.

    Raises:
        ProcessFailed: If a process failed; it holds the process's own traceback.
        ProcessesLeft: If the processes left because of an interrupt or a signal.
        TypeError: If `function` is not callable, or needs an object that cannot be pickled; the message names it.
        ValueError: If an argument is invalid, GPUs are too few, or this process is already one of several.
        OSError: If a port or an address cannot be used, or another machine does not come.
        RuntimeError: If the kernel already uses XLA, or TRAINER_KIT_DEBUG is set and a child cannot use the devices.
    """
    with _brief_errors():
        config = _config(
            function, args, num_processes, use_port, master_addr, rdzv_endpoint,
            num_nodes=num_nodes, node_rank=node_rank, mixed_precision=mixed_precision, rdzv_backend=rdzv_backend,
            rdzv_id=rdzv_id, rdzv_conf=rdzv_conf or {}, max_restarts=max_restarts, monitor_interval=monitor_interval,
        )  # fmt: skip
        where, logs = _where(config), _logs(log_line_prefix_template)
    return _run(config, function, args, where, logs)


def _config(
    function: Any,
    args: Any,
    num_processes: int | None,
    use_port: str | int,
    master_addr: str,
    rdzv_endpoint: str,
    num_nodes: int,
    **others: Any,
) -> LaunchConfig:
    if not callable(function):
        raise TypeError(f"function={function!r} cannot be called; give the function itself, without its arguments")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args={args!r} is a {type(args).__name__}; give a tuple of arguments, such as (1e-3,)")
    if environment.place().world_size > 1:
        raise ValueError(
            f"this process is one of {environment.place().world_size} that a launcher started, which cannot start "
            "others; call notebook_launcher in a process of its own"
        )
    for name, value in (("num_processes", num_processes), ("num_nodes", num_nodes)):
        if not isinstance(value, (int, NoneType)):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a whole number")
    if rdzv_endpoint:
        master_addr, _, use_port = rdzv_endpoint.rpartition(":")
    if not str(use_port).isdecimal():
        name = f"rdzv_endpoint={rdzv_endpoint!r}" if rdzv_endpoint else f"use_port={use_port!r}"
        raise ValueError(f"{name} has no port; give a number, such as 29500")
    return LaunchConfig(
        num_processes=None if num_processes is None else num_processes * num_nodes,
        num_nodes=num_nodes,
        master_addr=master_addr,
        master_port=int(use_port),
        cpu=environment.use_cpu(),
        tpu=environment.xla_device_type() is not None,
        **others,
    )


def _logs(template: Any) -> Logs:
    if not isinstance(template, (str, NoneType)):
        raise TypeError(
            f"log_line_prefix_template={template!r} is a {type(template).__name__}; give text, such as '[${{rank}}] '"
        )
    return Logs(prefix=template)


def _where(config: LaunchConfig) -> str:
    """Describe the devices of all machines together: "one CPU", "8 TPU devices"."""
    if config.tpu:
        count, thing = config.xla_devices() * config.num_nodes, f"{config.xla_device_type} device"
    else:
        count, thing = config.local_processes() * config.num_nodes, "GPU" if _gpus(config) else "CPU"
    return f"{'one' if count == 1 else count or 'all'} {pluralize(thing, count)}"


def _gpus(config: LaunchConfig) -> int:
    return 0 if config.cpu else count_gpus()


def _run(config: LaunchConfig, function: Callable[..., Any], args: Sequence[Any], where: str, logs: Logs) -> Any:
    """Run the function in the kernel if one process without restarts suffices, else in processes of its own."""
    if config.local_processes() * config.num_nodes == 1 and not config.max_restarts and not config.tpu:
        _say(f"Launching training on {where}.")
        with set_variables({environment.MIXED_PRECISION: config.mixed_precision}):
            return function(*args)  # its errors appear as a cell's own
    with _brief_errors(), set_variables(variables(config)):
        return _launch(config, function, args, where, logs)


def _launch(config: LaunchConfig, function: Callable[..., Any], args: Sequence[Any], where: str, logs: Logs) -> Any:
    if config.tpu:
        check_xla_is_free()
    obstacle = obstacle_to_fork(by_xla=config.tpu)
    if obstacle is not None:
        _say(f"{obstacle}; the processes start afresh, and {name_of(function)}() is sent to them.")
    start_method = "fork" if obstacle is None else "spawn"
    sent = Sent(function, args, pickled=obstacle is not None)
    if environment.debug():
        _try_child(config, start_method)
    _say(f"Launching training on {where}.")
    streams = PlainStreams()
    try:
        remedy = _remedy(config, name_of(function))
        values = run_processes(config, sent, start_method=start_method, logs=logs, say=_say, remedy=remedy)
    finally:
        del streams
        wait_for_output()
    return sent.value(values.get(0))


def _try_child(config: LaunchConfig, start_method: str) -> None:
    gpus = _gpus(config)
    devices = ["xla"] if config.tpu else [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    check_child(start_method, devices)
    what = f"{config.xla_device_type} by XLA" if config.tpu else format_count(gpus, "GPU") if gpus else "CPU"
    _say(f"A child process ({start_method}) can use the {what}.")


def _remedy(config: LaunchConfig, name: str) -> str:
    """Return the advice for a host that ran out of memory."""
    processes = config.local_processes()
    each = f"each of the {processes} processes" if processes > 1 else f"{name}()"
    return (
        f"make the model once in the notebook instead of in {each}, and pass it in as in "
        f"notebook_launcher({name}, (model,)); or let fewer workers load data"
    )


@contextlib.contextmanager
def _brief_errors() -> Iterator[None]:
    """Show an error in the notebook as its message, or the failed process's traceback, without our own frames."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        # IPython calls this method of an exception; plain Python ignores it.
        error._render_traceback_ = lambda: readable(text).splitlines()  # type: ignore[attr-defined]
        raise


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")

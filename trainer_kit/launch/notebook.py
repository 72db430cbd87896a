"""`notebook_launcher`: runs a function of a notebook in several processes."""

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


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: Literal["no", "fp16", "bf16"] = "no",
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
    """Runs `function(*args)` in several processes, from a notebook's cell or a Python session.

    The processes are forked from the kernel, so that they have all that the notebook made. Where CUDA is in use in the
    kernel already, a forked process could not use it: then they start afresh, and the function is sent to them with
    the objects that it uses. One process on one machine without restarts is the kernel itself.

    On TPUs (and wherever strategy "auto" takes XLA) one forked process drives all devices, and the kernel never touches
    them. A model that was made in the notebook, on the CPU, and is given in `args` takes no memory a second time.

    What the first process prints is shown; what the others print goes into files, whose folder is named at the end.
    Interrupting the kernel asks the processes to leave, a second time ends them at once.

    Args:
        function: What each process runs; a Trainer or Accelerator made in it finds the other processes by itself.
        args: Its arguments.
        num_processes: Processes on this machine; None for one per GPU, or one on a machine without GPUs. On TPUs it
            counts devices, all (None) or 1.
        mixed_precision: For runs whose arguments leave it at "no".
        use_port: The port of machine 0 for the rendezvous; "0" for a free one, and for 29500 where there are several
            machines.
        master_addr: Name or address of machine 0, as the other machines reach it.
        node_rank: Number of this machine, from 0.
        num_nodes: Machines; each runs this call in a notebook of its own.
        rdzv_backend: How machines find one another: "static" by their `node_rank`, "c10d" as they come.
        rdzv_endpoint: "host:port" in place of `master_addr` and `use_port`.
        rdzv_conf: More on how they find one another, such as {"timeout": 1200} seconds, see `LaunchConfig`.
        rdzv_id: Name of the run, the same on all machines.
        max_restarts: How often the processes are restarted after one has failed, see `LaunchConfig`.
        monitor_interval: Seconds between two looks at the processes.
        log_line_prefix_template: Shows what all processes print, each line after this; "${rank}", "${local_rank}" and
            "${role_name}" stand for the process's own. None: what the first process prints is shown, as it is.

    Returns:
        What the function returned on rank 0; None on the other machines.

    Raises:
        ProcessFailed: If a process failed, with its own traceback.
        ProcessesLeft: If the processes left because of an interrupt or a signal.
        TypeError: If `function` is none, or needs an object that cannot be sent to fresh processes, naming it.
        ValueError: If an argument makes no sense, if there are not enough GPUs, or if this process is one of several
            already.
        OSError: If a port or an address cannot be used, or another machine does not come.
        ImportError: If a package is missing.
        RuntimeError: If the kernel has used XLA already, which then serves no other process, or if TRAINER_KIT_DEBUG is
            set and a child process cannot use the devices.
    """
    with _brief_errors():
        config = _config(
            function, args, num_processes, use_port, master_addr, rdzv_endpoint,
            num_nodes=num_nodes, node_rank=node_rank, mixed_precision=mixed_precision, rdzv_backend=rdzv_backend,
            rdzv_id=rdzv_id, rdzv_conf=rdzv_conf or {}, max_restarts=max_restarts,
            monitor_interval=monitor_interval,
        )  # fmt: skip
        where, logs = _where(config), _logs(log_line_prefix_template)
    if config.local_processes() * num_nodes == 1 and not max_restarts and not config.tpu:
        _say(f"Launching training on {where}.")
        with set_variables({environment.MIXED_PRECISION: mixed_precision}):
            return function(*args)  # its errors are shown as a cell's own
    with _brief_errors(), set_variables(variables(config)):
        return _launch(config, function, args, where, logs)


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
    """What the run trains on, on all machines together: "one CPU", "8 TPU devices"."""
    if config.tpu:
        count, thing = config.xla_devices() * config.num_nodes, f"{config.xla_device_type} device"
    else:
        count, thing = config.local_processes() * config.num_nodes, "GPU" if _gpus(config) else "CPU"
    return f"{'one' if count == 1 else count or 'all'} {thing}{'s' if count != 1 else ''}"


def _gpus(config: LaunchConfig) -> int:
    return 0 if config.cpu else count_gpus()


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
    what = f"{config.xla_device_type} by XLA" if config.tpu else f"{gpus} GPUs" if gpus else "CPU"
    _say(f"A child process ({start_method}) can use the {what}.")


def _remedy(config: LaunchConfig, name: str) -> str:
    """What to do where the memory of the host ran out."""
    processes = config.local_processes()
    each = f"each of the {processes} processes" if processes > 1 else f"{name}()"
    return (
        f"make the model once in the notebook instead of in {each}, and pass it in as in "
        f"notebook_launcher({name}, (model,)); or let fewer workers load data"
    )


@contextlib.contextmanager
def _brief_errors() -> Iterator[None]:
    """Lets the notebook show an error as its sentence, or the failed process's traceback, instead of our own frames."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        # What IPython asks an exception for; other Pythons do not know it.
        error._render_traceback_ = lambda: readable(text).splitlines()  # type: ignore[attr-defined]
        raise


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")

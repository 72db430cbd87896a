"""`run_processes`: starts a command or a function in several processes and watches them until they end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError

from trainer_kit.config import environment
from trainer_kit.errors import ProcessesLeft, ProcessFailed
from trainer_kit.launch.agent import Agent
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.elastic_rendezvous import ElasticRendezvous
from trainer_kit.launch.failures import follows_loss
from trainer_kit.launch.function import Function
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.output import OutputFiles
from trainer_kit.launch.rendezvous import StaticRendezvous
from trainer_kit.utils.background import in_background
from trainer_kit.utils.streams import guard_standard_streams
from trainer_kit.utils.units import pluralize

__all__ = ["PREFIX", "Logs", "ProcessFailed", "ProcessesLeft", "planned", "run_processes"]

PREFIX = "[rank ${rank}] "

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")  # Windows lacks some of them
_STOP_SECONDS = 2.0  # for the agent to notice a signal before the processes start
_ABANDON_SECONDS = 10.0  # for the agent to end the processes
_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing")


class Logs(NamedTuple):
    """Output of the ranks. The first rank of a machine writes to the terminal, the others to files.

    Attributes:
        folder: Folder of the files, created if missing; None for a temporary one, which is removed if it stays empty.
        prefix: Prefix of each line in the terminal, such as `PREFIX`: "${rank}", "${local_rank}" and "${role_name}"
            stand for the rank's own. All ranks then write to files and to the terminal. None: no prefix.
    """

    folder: str | os.PathLike[str] | None = None
    prefix: str | None = None


def run_processes(
    config: LaunchConfig,
    entrypoint: str | Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    start_method: str = "spawn",
    logs: Logs | None = None,
    say: Callable[[str], None] | None = None,
    remedy: str = "",
) -> dict[int, Any]:
    """Run this machine's processes of a run and return when all have ended.

    Signals to this process (SIGINT, SIGTERM, SIGUSR1, SIGHUP) are forwarded once to the ranks, which may then take as
    long as they need; a second signal kills them. Signal handling requires the main thread.

    Args:
        config: What to start.
        entrypoint: A command, or a function.
        args: Arguments of the entrypoint, passed unchanged.
        start_method: How processes that run a function are started: "spawn", "fork" or "forkserver".
        logs: Where the ranks write; None for `Logs()`.
        say: Shows a sentence to the user; None for the standard error stream.
        remedy: Advice for a process that was killed because its host ran out of memory.

    Returns:
        The function's values, by global rank of this machine's processes; None for each rank of a command.

    Raises:
        ProcessFailed: If a rank failed; it holds the first failed rank's own traceback.
        ProcessesLeft: If the ranks left because of a signal.
        ValueError: If the machine has too few GPUs.
        OSError: If a port or an address cannot be used, or another machine does not come.
    """
    guard_standard_streams()
    say, logs = say or _say, logs or Logs()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainer_kit_")))
        settings = {environment.PROGRESS_FILE: str(scratch / "progress")}
        settings |= {environment.MEMBERSHIP: "", environment.NEWCOMER: ""}  # the agent sets them
        if config.min_nodes is not None:
            settings[environment.REGROUP_FOLDER] = str(scratch)
        stack.enter_context(set_variables(variables(config) | settings))
        stack.enter_context(_quiet_torch())
        signals = stack.enter_context(_signals())
        stack.enter_context(_in_own_words(signals))
        output = stack.enter_context(_output(scratch, logs, say))
        is_function = not isinstance(entrypoint, str)
        make_rendezvous = StaticRendezvous if config.rdzv_backend == "static" else ElasticRendezvous
        rendezvous = make_rendezvous(config, say, lambda: bool(signals), not is_function)
        stack.push(lambda kind, error, trace: rendezvous.leave(error))
        spec = _spec(config, entrypoint, args, rendezvous)
        agent = Agent(spec, config.restart_limit, output, start_method, Machines(config, rendezvous), signals, say)
        agent.remedies = _remedies(config, remedy)
        _run(agent)
        return agent.values() if is_function else {worker.global_rank: None for worker in agent.workers}


def _spec(
    config: LaunchConfig,
    entrypoint: str | Callable[..., Any],
    args: Sequence[Any],
    rendezvous: StaticRendezvous | ElasticRendezvous,
) -> WorkerSpec:
    return WorkerSpec(
        role="trainer_kit",
        local_world_size=config.local_processes(),
        entrypoint=entrypoint if isinstance(entrypoint, str) else Function(entrypoint, args),
        # The agent replaces $-names in arguments; the user's must stay unchanged.
        args=tuple(str(arg).replace("$", "$$") for arg in args) if isinstance(entrypoint, str) else (),
        rdzv_handler=rendezvous,
        max_restarts=config.restart_limit.failures,
        monitor_interval=config.monitor_interval,
    )


def variables(config: LaunchConfig) -> dict[str, str]:
    """Return the environment variables that pass the user's choices to the ranks of this machine.

    Args:
        config: What to start.

    Raises:
        ValueError: If the machine has too few GPUs.
    """
    settings = {
        environment.MIXED_PRECISION: config.mixed_precision,
        environment.USE_CPU: str(int(config.cpu)),
        environment.FSDP: str(int(config.fsdp)),
        environment.ACCUMULATION: str(config.gradient_accumulation_steps),
        environment.DYNAMO_BACKEND: config.dynamo_backend,
        environment.USE_TPU: str(int(config.tpu)),
        environment.ELASTIC: str(int(config.min_nodes is not None)),
    }
    if config.num_nodes > 1 and environment.CPP_LOG_LEVEL not in os.environ:
        # A lost store would otherwise be reported by each process in dozens of lines of C++ frames.
        settings[environment.CPP_LOG_LEVEL] = "ERROR"
    if config.profile is not None:
        settings[environment.PROFILE] = config.profile
    processes = config.local_processes()
    if config.tpu:
        settings["PJRT_DEVICE"] = config.xla_device_type
        if config.num_processes == 1:
            is_tpu = config.xla_device_type == "TPU"
            settings |= environment.ONE_TPU_CHIP if is_tpu else {"CPU_NUM_DEVICES": "1"}
    if config.debug:
        settings[environment.DEBUG[0]] = "1"
    if config.num_cpu_threads_per_process is not None:
        settings["OMP_NUM_THREADS"] = str(config.num_cpu_threads_per_process)
    elif "OMP_NUM_THREADS" not in os.environ and processes > 1:
        # Each rank would otherwise use all processors, and the ranks would slow one another down.
        settings["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    return settings


def planned(config: LaunchConfig, words: Sequence[str]) -> list[str]:
    """Return the commands that `run_processes` would start on this machine: one shell line per rank.

    Args:
        config: What to start.
        words: The command and its arguments.

    Raises:
        ValueError: If the machine has too few GPUs.
    """
    processes = config.local_processes()
    lines = []
    for local_rank in range(processes):
        place = {
            "RANK": config.node_rank * processes + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": config.num_nodes * processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": config.candidates[0],
            "MASTER_PORT": config.port or "<a free one>",
            **variables(config),
        }
        settings = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in place.items())
        lines.append(f"{settings} {shlex.join(words)}")
    return lines


def _remedies(config: LaunchConfig, remedy: str) -> dict[int, str]:
    """Return the advice by the exit code of a process whose host ran out of memory."""
    names = ("SIGKILL", "SIGSEGV") if config.tpu else ("SIGKILL",)  # XLA crashes where it cannot allocate memory
    return {-getattr(signal, name): remedy for name in names if remedy and hasattr(signal, name)}


def _run(agent: Agent) -> None:
    """Run the agent in another thread, so that this thread can receive signals.

    Raises:
        ProcessFailed: If a rank failed.
        ProcessesLeft: If the ranks left because of a signal.
        InterruptedError: If a signal came before the ranks were started.
    """
    # A daemon thread, because torch may wait for other machines without a way to interrupt it.
    future: Future[RunResult | None] = in_background(agent.run, "trainer_kit agent")
    give_up_at = math.inf
    try:
        while not concurrent.futures.wait([future], timeout=0.2).done and time.monotonic() < give_up_at:
            if agent.signals and not agent.has_started and give_up_at == math.inf:
                give_up_at = time.monotonic() + _STOP_SECONDS
    except BaseException:  # the program's signal handler raised: the ranks must not outlive this thread
        agent.signals.extend([signal.SIGTERM, signal.SIGTERM])
        concurrent.futures.wait([future], timeout=_ABANDON_SECONDS)
        raise
    if not future.done():
        raise InterruptedError
    result = future.result()
    if agent.exit_code is not None:
        raise ProcessesLeft(agent.exit_code)
    failed = agent.failed
    if result is None:  # the run ended while this machine waited for a place in it, after a failure or not
        if failed is not None and not follows_loss(failed):
            raise failed
    elif result.is_failed():
        assert failed is not None
        raise failed


@contextlib.contextmanager
def _in_own_words(signals: deque[int]) -> Iterator[None]:
    """Translate the exceptions of torch and of `Waiting` into errors for the user."""
    try:
        yield
    except InterruptedError:
        raise ProcessesLeft(130 if signals[0] == signal.SIGINT else 143) from None
    except RendezvousError as error:
        reason = str(error) or type(error).__name__
        raise ConnectionError(f"the machines did not find one another at the rendezvous: {reason}") from error


@contextlib.contextmanager
def _signals() -> Iterator[deque[int]]:
    """Collect the signals to this process; ignored signals stay ignored."""
    received: deque[int] = deque()
    process = os.getpid()
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            received.append(number)
        else:  # a newly forked child inherits this handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: set outside Python, which cannot set it again
                before[number] = handler
                signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def set_variables(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started within the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch's messages about processes from the terminal: the launcher reports them itself."""
    loggers, handler = [logging.getLogger(name) for name in _TORCH_LOGGERS], logging.NullHandler()
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


@contextlib.contextmanager
def _output(scratch: Path, logs: Logs, say: Callable[[str], None]) -> Iterator[OutputFiles]:
    """Create the ranks' output files; at the end report their folder, or remove a temporary one that is not needed."""
    folder = Path(logs.folder or tempfile.mkdtemp(prefix="trainer_kit_output_"))
    output = OutputFiles(folder, scratch, logs.prefix)
    try:
        yield output
    finally:
        written = output.written()
        if written and logs.prefix is None:
            ranks = sorted({int(path.stem.removeprefix("rank-")) for path in written})
            say(f"the output of {pluralize('rank', len(ranks))} {', '.join(map(str, ranks))} is in {folder}")
        elif logs.folder is None:  # it is empty, or its content was shown
            shutil.rmtree(folder, ignore_errors=True)


def _say(sentence: str) -> None:
    sys.stderr.write(f"trainer_kit: {sentence}\n")

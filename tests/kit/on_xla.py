"""Functions run in processes of their own, forked from this one: torch_xla begins once in a process, and then stays.

    from kit.on_xla import on_cpu, on_xla

    def weights(strategy: str) -> dict[str, torch.Tensor]: ...

    def test_weights():
        assert_close(on_xla(4, weights, "xla"), on_cpu(weights, "single"))     # 4 devices of XLA's CPU client

The process that forks has imported torch_xla, which takes seconds, but has touched no device and called no backward():
both would break XLA in its children. A function may be a closure; what it returns is pickled. What it raises is raised
here as `ChildFailed`. A child that does not end within `timeout` seconds is killed, with the processes it started.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

QUICK = "--xla_backend_optimization_level=0"
"""XLA_FLAGS with which XLA compiles several times faster, and computes the same but for rounding."""


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        value: What the function returned.
        error: The traceback of what it raised; empty where it raised nothing.
        output: What was written to stdout and stderr.
        code: Its exit code; -9 for a child that was killed.
    """

    value: Any
    error: str
    output: str
    code: int | None


class ChildFailed(AssertionError):
    """The function raised, or its process died; the text is the traceback, or what the process wrote."""


def on_xla(devices: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> Any:
    """Runs `function(*args)` where XLA finds `devices` devices; returns what it returns."""
    return _value(try_on_xla(devices, function, *args, timeout=timeout))


def on_cpu(function: Callable[..., Any], *args: Any, timeout: float = 240) -> Any:
    """Runs `function(*args)` where nothing speaks of XLA; returns what it returns."""
    return _value(_forked({}, function, args, timeout))


def try_on_xla(devices: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> Ended:
    """The same as `on_xla`, for functions that raise or die."""
    return _forked({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "XLA_FLAGS": QUICK}, function, args, timeout)


def _value(ended: Ended) -> Any:
    if ended.error or ended.code:
        raise ChildFailed(ended.error or f"the process ended with code {ended.code}:\n{ended.output}")
    return ended.value


def _forked(environment: dict[str, str], function: Callable[..., Any], args: Any, timeout: float) -> Ended:
    with tempfile.TemporaryFile() as output:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, output.fileno(), environment, function, args))
        process.start()
        sender.close()
        try:
            end = time.monotonic() + timeout
            while not receiver.poll(0.05) and process.is_alive():
                if time.monotonic() > end:
                    raise ChildFailed(f"the process does not end within {timeout} s:\n{_read(output)}")
            try:
                value, error = pickle.loads(receiver.recv_bytes())
            except EOFError:  # it died
                value, error = None, ""
            process.join(max(1, end - time.monotonic()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
            receiver.close()
        return Ended(value, error, _read(output), process.exitcode)


def _child(
    sender: Connection, output: int, environment: dict[str, str], function: Callable[..., Any], args: Any
) -> None:
    os.setpgid(0, 0)  # whoever it starts is ended with it
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)  # instead of pytest's
    logging.root.handlers.clear()
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    value, error = None, ""
    try:
        value = function(*args)
    except BaseException:  # it is raised in the test
        error = traceback.format_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(pickle.dumps((value, error)))


def _read(output: Any) -> str:
    output.seek(0)
    return str(output.read().decode(errors="replace"))

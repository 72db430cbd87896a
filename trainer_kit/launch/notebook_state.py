"""State of a notebook's kernel that decides how processes can be started from it."""

from __future__ import annotations

import ast
import ctypes
import importlib
import logging
import multiprocessing
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

from trainer_kit.launch.processes import set_variables
from trainer_kit.strategies.xla.strategy import import_torch_xla
from trainer_kit.utils.thread_pool import renew_thread_pool
from trainer_kit.utils.units import format_duration, join_names

# Calls of torch.cuda that do not touch the driver, and of torch_xla that do not start its runtime.
_HARMLESS = {
    "cuda": {"device_count", "is_initialized", "manual_seed", "manual_seed_all"},
    "xla": {"device_type", "initialize_cache", "is_spmd", "set_device_type", "use_spmd"},
}
# Classes that take their device when they are created.
_TAKE_DEVICE = {"Accelerator", "Trainer", "PartialState", "pipeline"}
# Packages that may touch the driver when they are imported.
_TOUCH_AT_IMPORT = ("bitsandbytes", "cupy", "flash_attn", "jax", "tensorflow", "torchao", "xformers")
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
# Part of the autograd engine's error for a device that appears after its first backward() (pytorch/xla#4174).
_UNKNOWN_TO_ENGINE = "device_ready_queues_"

_TRIAL_SECONDS = 120.0
_OUTPUT_SECONDS = 1.0


def obstacle_to_fork(by_xla: bool = False) -> str | None:
    """Return why a forked copy of this process could not train; None if it can.

    OpenMP's threads in the kernel are no obstacle: they belong to the thread that used them, and the launcher forks
    from its own thread.

    Args:
        by_xla: Whether the process would train on XLA.
    """
    if sys.platform != "linux":
        return f"forked processes are not safe on {sys.platform}"
    if by_xla:
        return _obstacle_to_xla()
    if cuda_in_use():
        return f"CUDA is already in use in this kernel ({user_of('cuda')}), and a forked process could not use it"
    return None


def _obstacle_to_xla() -> str | None:
    """Return why XLA could not compute a gradient in a forked copy of this process; None if it can.

    A forked copy tries it on XLA's own CPU client. PyTorch offers no query: its autograd engine counts devices at the
    first backward(), and starts no thread for the CPU.
    """
    import_torch_xla()  # here, so that each forked process has it
    with set_variables({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}):
        trouble = _trouble_of_child("fork", ["xla"])
    if _UNKNOWN_TO_ENGINE in trouble:
        return (
            "a backward() has run in this kernel, after which XLA computes no gradients here or in a forked process "
            "(pytorch/xla#4174)"
        )
    return f"a forked process cannot compute by XLA here ({trouble})" if trouble else None


def check_xla_is_free() -> None:
    """Check that XLA's runtime has not been started in this process, without starting it.

    Raises:
        RuntimeError: If it has; the message names the cell if known.
    """
    module = sys.modules.get("torch_xla")
    if module is not None and module._XLAC._xla_runtime_is_initialized():
        raise RuntimeError(
            f"XLA is already in use in this kernel ({user_of('xla')}), and its devices serve one process only; restart "
            "the kernel, make the model on the CPU, pass it to notebook_launcher, and use XLA inside the function"
        )


def cuda_in_use() -> bool:
    """Return whether torch or another library has started CUDA's driver in this process, without starting it."""
    if torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def user_of(kind: str) -> str:
    """Describe which cell started CUDA or XLA and which objects use it, from the notebook's history and names.

    Args:
        kind: "cuda" or "xla".
    """
    shell = _shell()
    names: Mapping[str, Any] = shell.user_ns if shell is not None else sys.modules["__main__"].__dict__
    found = []
    for number, source in enumerate(names.get("In", ())):
        line = _line_with(kind, source, names)
        if line is not None:
            found.append(f"cell [{number}]: `{line}`")
            break
    there = [name for name, value in names.items() if not name.startswith("_") and _lies_on(kind, value)]
    if there:
        found.append(f"on the {'GPU' if kind == 'cuda' else 'device'}: {join_names(there, most=None)}")
    if not found:
        imported = [name for name in _TOUCH_AT_IMPORT if name in sys.modules and kind == "cuda"]
        found.append(f"perhaps by importing {' or '.join(imported)}" if imported else "no cell shows by what")
    return "; ".join(found)


def _shell() -> Any:
    """Return IPython's shell; None outside of it."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _lies_on(kind: str, value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return any(_lies_on(kind, tensor) for tensor in value.parameters())
    return isinstance(value, torch.Tensor) and bool(getattr(value, f"is_{kind}"))


def _line_with(kind: str, source: str, names: Mapping[str, Any]) -> str | None:
    """Return the first line of a cell that uses CUDA or XLA when the cell runs; None if there is none.

    Function bodies do not count: they do not run with the cell.
    """
    try:
        tree = ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines()))
    except SyntaxError:
        return None
    for statement in tree.body:
        if any(isinstance(node, ast.Call) and _uses(kind, node, names) for node in _running_nodes(statement)):
            line = ast.unparse(statement).splitlines()[0]
            return line if len(line) <= 80 else line[:77] + "..."
    return None


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _running_nodes(child)


def _uses(kind: str, call: ast.Call, names: Mapping[str, Any]) -> bool:
    called = ast.unparse(call.func)
    last = called.rpartition(".")[2]
    if _package(called, names) == {"cuda": "torch.cuda", "xla": "torch_xla"}[kind]:
        return last not in _HARMLESS[kind]
    if last == kind or last in _TAKE_DEVICE:
        return True
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in ("device", "device_map"))]
    return last != "device" and any(_names_device(kind, value, names) for value in values)


def _package(called: str, names: Mapping[str, Any]) -> str:
    """Return the package of the called function: "torch.cuda", "torch_xla", or "" for any other."""
    if called.startswith("torch.cuda."):
        return "torch.cuda"
    known = names.get(called.partition(".")[0])
    module = known.__name__ if isinstance(known, ModuleType) else getattr(known, "__module__", "")
    return "torch_xla" if str(module).partition(".")[0] == "torch_xla" else ""


def _names_device(kind: str, value: ast.expr, names: Mapping[str, Any]) -> bool:
    if isinstance(value, ast.Name):
        known = names.get(value.id)
        return isinstance(known, (str, torch.device)) and str(known).startswith(kind)
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith(kind)


def check_child(start_method: str, devices: Sequence[str]) -> None:
    """Compute a gradient on each device in a child process.

    Args:
        start_method: "spawn", "fork" or "forkserver".
        devices: Names of the devices.

    Raises:
        RuntimeError: If the child cannot compute it.
    """
    trouble = _trouble_of_child(start_method, devices)
    if trouble:
        raise RuntimeError(
            f"a child process ({start_method}) cannot compute here: {trouble}; restart the kernel, and call "
            "notebook_launcher before anything else uses a device"
        )


def _trouble_of_child(start_method: str, devices: Sequence[str]) -> str:
    """Return why a child process could not compute a gradient on these devices; empty if it could."""
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_try_devices, args=(devices, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        trouble = ours.recv() if ours.poll(_TRIAL_SECONDS) else f"no answer within {format_duration(_TRIAL_SECONDS)}"
    except EOFError:
        child.join()
        trouble = f"it ended with exit code {child.exitcode}"
    child.kill()
    child.join()
    return str(trouble)


def _try_devices(devices: Sequence[str], answer: Connection) -> None:
    try:
        if "xla" in devices:
            importlib.import_module("torch_xla")
            renew_thread_pool()
        for device in devices:
            tensor = torch.ones(1, device=device, requires_grad=True)
            tensor.sum().backward()
            str(tensor.grad)  # waits for it
        answer.send("")
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def readable(text: str) -> str:
    """Return a traceback with cell names in place of the kernel's file names."""
    shell = _shell()

    def name(match: re.Match[str]) -> str:
        known = shell.compile.format_code_name(match[1])
        return " ".join(known) if known else match[0]

    return text if shell is None else re.sub(r'File "([^"]+)"', name, text)


def show_from_child(is_shown: bool) -> None:
    """Let a forked process show figures, tables and progress bars in the notebook, or suppress the warnings about it.

    The kernel forwards the messages of a forked process, but its session sends only from the process whose id it holds.

    Args:
        is_shown: Whether to show them.
    """
    kernel = getattr(_shell(), "kernel", None)
    if kernel is None:
        return
    if is_shown:
        kernel.session.pid = os.getpid()
    else:
        kernel.log.setLevel(logging.ERROR)  # it would warn of each suppressed message


def wait_for_output() -> None:
    """Wait until the kernel has shown the processes' output, for at most a second."""
    if _shell() is None or sys.platform == "win32":
        return
    import fcntl
    import termios

    deadline = time.monotonic() + _OUTPUT_SECONDS
    for descriptor in (1, 2):
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        while is_pipe and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(0.01)
    time.sleep(0.02)  # the last piece is still being shown
    sys.stderr.flush()
    sys.stdout.flush()

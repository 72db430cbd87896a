"""Python scripts and the launcher in processes that need not import torch: they are forked from a server that has.

    process = PreloadedPython(["-m", "trainer_kit", "launch", "--cpu", SCRIPT], tmp_path / "out", tmp_path / "err")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(60)

What the launcher starts is forked from it instead of executed; all else is as in a process of a command: its own
session, environment, arguments, output and exit code. Tests that ask how a process starts take a real one.
"""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from kit.forked import fork_server
from kit.releases import without_gloo
from trainer_kit.launch.script import main as run_as_rank
from trainer_kit.launch.script import run_as_main
from trainer_kit.utils.thread_pool import renew_thread_pool

_RANK = ["-m", "trainer_kit.launch.script"]


class PreloadedPython:
    """A process that runs Python with these words, as `subprocess.Popen` would in a session of its own.

    Args:
        words: A script, or "-m" and a module, and the arguments.
        out: File that the standard output is appended to.
        err: File that the errors are appended to.
        env: Environment; None for the same as here.
        setup: Called first in the process, with `setup_args`.
    """

    def __init__(
        self,
        words: list[str],
        out: Path,
        err: Path,
        env: Mapping[str, str] | None = None,
        setup: Callable[..., None] | None = None,
        setup_args: tuple[Any, ...] = (),
    ) -> None:
        self.out, self.err = out, err
        env = dict(os.environ if env is None else env)
        for path in (out, err):
            path.touch()
        self._process = fork_server().Process(target=_run_command, args=(words, out, err, env, setup, setup_args))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("Python", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return without_gloo(self.out.read_text()), self.err.read_text()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ForkingPopen(subprocess.Popen[bytes]):
    """Forks where `subprocess.Popen` forks and executes this Python with `_RANK`."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        words, env, stdout, stderr = list(args), given[5], given[12], given[14]
        assert words[:3] == [sys.executable, *_RANK], words
        ready, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            run_to_exit(lambda: _run_rank(words[3:], env, stdout, stderr, done))
        os.close(done)
        os.read(ready, 1)  # it leads its process group from here on
        os.close(ready)
        self.pid = pid
        self._child_created = True


def _run_command(
    words: list[str], out: Path, err: Path, env: dict[str, str], setup: Callable[..., None] | None, setup_args: Any
) -> NoReturn:
    def command() -> None:
        subprocess_handler.Popen = _ForkingPopen  # type: ignore[misc, assignment]
        become(env, *(os.open(path, os.O_WRONLY | os.O_APPEND) for path in (out, err)))
        if setup is not None:
            setup(*setup_args)
        run_as_main(words)

    run_to_exit(command)


def _run_rank(words: list[str], env: dict[str, str], stdout: int, stderr: int, done: int) -> None:
    become(env, stdout, stderr)
    os.close(done)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = ["script", *words]
    run_as_rank()


def become(env: dict[str, str], stdout: int, stderr: int) -> None:
    """Give this process what a new one has of its own; -1 stands for the output of the process that starts it."""
    os.setsid()
    renew_thread_pool()
    for number, file in ((1, stdout), (2, stderr)):
        if file != -1:
            os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, "")
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # what the starting process has to clean up
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


def run_to_exit(function: Callable[[], None]) -> NoReturn:
    """Run a function as Python runs a program: to the end of its threads and exit handlers."""
    code: Any = 0
    try:
        function()
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)

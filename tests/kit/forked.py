"""Processes that need not import torch, forked from a server that has; `trainer_kit.tools.verify` starts such ones."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

from trainer_kit.tools.verify.child import main
from trainer_kit.tools.verify.recorder import RecordedStart
from trainer_kit.tools.verify.verification import Result, Verification
from trainer_kit.utils.thread_pool import renew_thread_pool

# For all tests, since there is one server.
_IMPORTED = [
    "kit.measured", "kit.architectures", "trainer_kit.strategies.fsdp.strategy",
    "torch._dynamo", "trainer_kit.strategies.watchdog.heartbeat", "trainer_kit.tools.verify.child",
    "trainer_kit.trainer", "trainer_kit.accelerator", "trainer_kit.callbacks", "trainer_kit.strategies.multinode",
    "trainer_kit.cli.launch", "trainer_kit.launch.processes", "trainer_kit.launch.script",
    "trainer_kit.callbacks.tensorboard", "trainer_kit.utils.event_file", "trainer_kit.report.page",
    "trainer_kit.callbacks.checkpointing", "trainer_kit.callbacks.console", "trainer_kit.callbacks.preemption",
    "torch.utils.tensorboard.summary", "tensorboard.summary.writer.record_writer", "kit.frozen",
]  # fmt: skip
_TASK = Path(__file__).parents[1] / "tools" / "task.py"


def fork_server() -> BaseContext:
    """Makes processes, of functions in modules that they can import; on Windows, from nothing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:  # Python before 3.13 does not tell the server what pytest adds
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


class ForkedVerification(Verification):
    """Its starts are children of a server that has imported everything but the script."""

    def _execute(self, start: RecordedStart, log: Path) -> int:
        process = fork_server().Process(target=_run, args=(start.dumps(), self.words, str(log)))
        process.start()
        try:
            process.join(60)
        finally:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return process.exitcode


def verified(way: str, seed: int = 1, steps: int = 6) -> Result:
    """Verifies the script `tools/task.py` in this working directory."""
    return ForkedVerification([str(_TASK), way], steps, seed, processes=1, timeout=60, say=lambda sentence: None).run()


def _run(start: str, words: list[str], log: str) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    renew_thread_pool()
    sys.argv = ["start", start, *words]
    main()

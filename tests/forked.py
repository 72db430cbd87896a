"""Starts of a script for `trainer_kit.tools.verify` without importing torch each time: forked from one that has."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from trainer_kit.tools.verify.recorder import Start
from trainer_kit.tools.verify.start import main
from trainer_kit.tools.verify.verification import Verification


class ForkedVerification(Verification):
    """Its starts are children of a server that has imported everything but the script."""

    def _execute(self, start: Start, log: Path) -> int:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trainer_kit.tools.verify.start", "torch._dynamo"])
        process = context.Process(target=_run, args=(start.dumps(), self.words, str(log)))
        process.start()
        try:
            process.join(60)
        finally:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return process.exitcode


def _run(start: str, words: list[str], log: str) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["start", start, *words]
    main()

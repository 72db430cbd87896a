"""`plan`: runs a user's script up to its training, and shows what that would do."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from trainer_kit.tools.takeover import Train, run_until_training
from trainer_kit.trainer import Trainer


def plan(words: Sequence[str], processes: int | None, as_json: bool, fail: Callable[[str], None]) -> NoReturn:
    """Shows the plan of the script's first training on stdout, with which the process ends.

    Its code is 0, or 1 where `train()` would not go through.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        processes: As if so many had been launched; None: this one.
        as_json: Show it for machines; what the script prints goes to stderr then.
        fail: Told why there is no plan.

    Raises:
        ValueError: If the script fails before it trains, or never does.
    """
    out = sys.stdout

    def take_over(trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> int:
        try:
            found = trainer.plan(resume_from_checkpoint, processes)
        except (OSError, TypeError, ValueError) as error:
            fail(str(error))
            return 1
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # not every terminal knows the characters of the drawing
        with contextlib.suppress(BrokenPipeError):  # the reader has what it wanted (`| head`)
            print(json.dumps(found.to_dict(), indent=2) if as_json else found, file=out, flush=True)
        return 1 if found.problems else 0

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        run_until_training(words, take_over)

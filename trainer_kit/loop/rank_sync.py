"""What the processes of a run settle between them: that they run the same thing, and what is due after a step."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from trainer_kit.data.map_loader import GlobalBatch
from trainer_kit.run import Run
from trainer_kit.state import Requests

_FLAGS = ("log", "evaluate", "save", "stop", "written")
_TOLD_TO_LEAVE = 143  # on hosts that do not hear which signal another one got
_PACKAGES = ("trainer_kit", "torch", "transformers", "numpy")


class RankSync:
    """Makes what one process asks for the wish of all.

    A callback asks on its own process, and a signal reaches one at any moment. So `run.requests` holds what this
    process asked for since the last reduction, and `due` what all know of and nobody has done yet.

    Args:
        run: Its strategy is set up.

    Attributes:
        pending: What is to be done after this step, the same on all processes.
        disagreement: What is wrong where the processes have not all read the same window; None where they have.
        all_have_read: Whether each process gave a window last.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pending = Requests()
        self.disagreement: str | None = None
        self.all_have_read = True

    def sync(self, window: GlobalBatch | None = None) -> bool:
        """Takes up what any process asked for, and sums the counts of the next step's `window`, in one reduction.

        Returns:
            Whether anything is to be done.
        """
        run, pending = self.run, self.pending
        asked = run.requests
        leaves = (
            asked.exit_code is not None and pending.exit_code is None
        )  # never cleared: a signal may set it right now
        flags = [asked.log, asked.evaluate, asked.save, asked.stop, asked.written, leaves]
        for name, flag in zip(_FLAGS, flags, strict=False):
            if flag:
                setattr(asked, name, False)
        here = (1, window.stop, int(window.closes_epoch)) if window is not None else (0, 0, 0)
        sums = run.strategy.collectives.all_reduce_ints(
            [*flags, *here, *(window.numbers() if window is not None else (0, 0, 0, 0))]
        )
        self.all_have_read = sums[6] == run.strategy.world_size
        if window is not None:
            self.disagreement = _disagreement(here, sums[6:9], run.strategy.world_size)
            if self.disagreement is None:
                window.set_numbers(sums[9:], run.strategy.collectives.all_reduce)
        if not any(sums[:6]):
            return pending.log or pending.evaluate or pending.save or pending.stop or pending.written
        for name, asking in zip(_FLAGS, sums, strict=False):
            if asking:
                setattr(pending, name, True)
        if sums[5]:
            codes = run.strategy.collectives.gather_object(asked.exit_code if leaves else None)
            pending.exit_code = next((code for code in codes if code is not None), _TOLD_TO_LEAVE)
            run.requests.exit_code = pending.exit_code
            pending.stop = True
            pending.save = pending.save or run.args.save_strategy != "no"
        return True


def _disagreement(here: tuple[int, int, int], sums: Sequence[int], processes: int) -> str | None:
    """Whether all processes have a next window, which ends at the same place."""
    if sums[0] < processes:
        return "another process of this run could not read its data; its own error says why"
    if [number * processes for number in here] != [*sums]:
        return (
            "train_dataset does not give all processes the same samples; it must not divide itself by rank: each "
            "process takes its share of the whole"
        )
    return None


def check_same_start(run: Run) -> None:
    """Compares versions, script, arguments and data over the processes of a run, where there are several.

    Raises:
        ValueError: Naming the first process and the first of these that differs.
    """
    if run.strategy.collectives.is_alone:
        return
    facts: dict[str, Any] = {"the version of Python": platform.python_version()}
    facts |= {f"the version of {name}": _version(name) for name in _PACKAGES}
    facts["the script"] = _script()
    facts |= run.args.to_dict()
    for name in ("output_dir", "logging_dir"):  # absolute by now: on another machine they may lie in another folder
        facts[name] = facts[name] and Path(facts[name]).name
    for role in ("train_dataset", "eval_dataset"):
        dataset = getattr(run, role)
        facts[f"the length of {role}"] = len(dataset) if hasattr(dataset, "__len__") else None
    run.strategy.collectives.check_same_on_all_ranks(facts)


def _version(package: str) -> str | None:
    try:
        return torch.__version__ if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _script() -> str | None:
    """Name and checksum of what runs as the main program; None in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return f"{Path(path).name} ({xxhash.xxh3_64_hexdigest(Path(path).read_bytes())})"

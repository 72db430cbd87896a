"""Agreement between ranks: the requests to serve after a step, and the check that all ranks run the same thing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from trainer_kit.data.map_loader import GlobalBatch
from trainer_kit.data.source import data_length
from trainer_kit.errors import LostProcessError
from trainer_kit.run import Run
from trainer_kit.state import Requests

_FLAGS = ("log", "evaluate", "save", "stop", "written")
_TOLD_TO_LEAVE = 143  # exit code on hosts that do not know which signal another host received
_PACKAGES = ("trainer_kit", "torch", "transformers", "numpy")


class RankSync:
    """Share each rank's requests with all ranks.

    A callback or a signal makes a request on one rank, at any moment. `run.requests` holds this rank's requests since
    the last reduction. `pending` holds the requests that all ranks know and have not served yet.

    Args:
        run: The run; its strategy is set up.

    Attributes:
        pending: The requests to serve after this step, the same on all ranks.
        disagreement: Error message if the ranks have not all read the same global batch; None if they have.
        all_have_read: Whether every rank passed a global batch to the last `sync`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pending = Requests()
        self.disagreement: str | None = None
        self.all_have_read = True

    def sync(self, window: GlobalBatch | None = None) -> bool:
        """Share the requests of all ranks, and sum the counts of the next global batch, in one reduction. Collective.

        Args:
            window: The global batch of the next step; None if this rank has none. Its counts are set to the sums.

        Returns:
            Whether any request is pending.
        """
        run, pending = self.run, self.pending
        asked = run.requests
        # asked.exit_code is never cleared: a signal handler may set it at any moment.
        leaves = asked.exit_code is not None and pending.exit_code is None
        flags = [asked.log, asked.evaluate, asked.save, asked.stop, asked.written, leaves]
        for name, flag in zip(_FLAGS, flags, strict=False):
            if flag:
                setattr(asked, name, False)
        here = (0, 0, 0, 0)
        if window is not None:
            here = (1, window.stop, int(window.closes_epoch), window.fingerprint)
        collectives = run.strategy.collectives
        with self._kept_after_loss(flags):
            counts = window.numbers() if window is not None else (0, 0, 0, 0)
            sums = collectives.all_reduce_ints([*flags, *here, *counts])
        self.all_have_read = sums[6] == collectives.world_size
        if window is not None:
            self.disagreement = _disagreement(here, sums[6:10], collectives.world_size)
        if collectives.world_size > 1:
            self._set_counts(window, sums[10:])
        if not any(sums[:6]):
            return pending.log or pending.evaluate or pending.save or pending.stop or pending.written
        for name, asking in zip(_FLAGS, sums, strict=False):
            if asking:
                setattr(pending, name, True)
        if sums[5]:
            codes = collectives.gather_object(asked.exit_code if leaves else None)
            pending.exit_code = next((code for code in codes if code is not None), _TOLD_TO_LEAVE)
            run.requests.exit_code = pending.exit_code
            pending.stop = True
            pending.save = pending.save or run.args.save_strategy != "no"
        return True

    @contextlib.contextmanager
    def _kept_after_loss(self, flags: Sequence[bool]) -> Iterator[None]:
        """Keep the requests of this rank if they do not reach the others."""
        try:
            yield
        except LostProcessError:
            for name, flag in zip(_FLAGS, flags, strict=False):
                setattr(self.run.requests, name, getattr(self.run.requests, name) or flag)
            raise

    def hand_back(self) -> None:
        """Make the pending requests those of this rank again, after a loss of other ranks."""
        for name in ("log", "evaluate", "save", "stop"):
            setattr(self.run.requests, name, getattr(self.run.requests, name) or getattr(self.pending, name))

    def _set_counts(self, window: GlobalBatch | None, sums: Sequence[int]) -> None:
        """Set the counts of a global batch to those of all readers, from the sums over all ranks. Collective."""
        collectives = self.run.strategy.collectives
        if collectives.reader_size > 1:
            numbers = collectives.gather_object(window.numbers() if window is not None else None)
            self.disagreement = self.disagreement or _different_peers(numbers, collectives.reader_size)
        if window is not None and self.disagreement is None:
            window.set_numbers([total // collectives.reader_size for total in sums], collectives.sum_over_readers)


def _disagreement(here: tuple[int, int, int, int], sums: Sequence[int], processes: int) -> str | None:
    """Return what is wrong unless all ranks have a next global batch that ends at the same position."""
    if sums[0] < processes:
        return "another process of this run could not read its data; its own error says why"
    if [number * processes for number in here] != [*sums]:
        return (
            "train_dataset does not give all processes the same samples in the same order; neither it nor its sampler "
            "may divide itself by rank or shuffle without a seed: each process takes its share of the whole"
        )
    return None


def _different_peers(numbers: Sequence[tuple[int, ...] | None], size: int) -> str | None:
    """Return what is wrong if processes that count as one reader have not counted the same in their batches."""
    for first in range(0, len(numbers), size):
        if len({*numbers[first : first + size]}) > 1:
            return (
                f"ranks {first} to {first + size - 1} compute layers together, but have read other batches; "
                "train_dataset must give all processes the same samples"
            )
    return None


def check_same_start(run: Run) -> None:
    """Check that all processes of a run have the same versions, script, arguments and data.

    Raises:
        ValueError: If they differ; the message names the first process and the first difference.
    """
    if run.strategy.collectives.is_alone:
        return
    facts: dict[str, Any] = {"the version of Python": platform.python_version()}
    facts |= {f"the version of {name}": _version(name) for name in _PACKAGES}
    facts["the script"] = _script()
    facts |= run.args.to_dict()
    for name in ("output_dir", "logging_dir"):  # absolute paths may differ between machines
        facts[name] = facts[name] and Path(facts[name]).name
    for role in ("train_dataset", "eval_dataset"):
        dataset = getattr(run, role)
        facts[f"the length of {role}"] = data_length(dataset)
    run.strategy.collectives.check_same_on_all_ranks(facts)


def _version(package: str) -> str | None:
    try:
        return torch.__version__ if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _script() -> str | None:
    """Return name and checksum of the main script; None in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return f"{Path(path).name} ({xxhash.xxh3_64_hexdigest(Path(path).read_bytes())})"

"""A training whose state is copied to memory, with processes that stand for machines."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios import task

from kit.ranks import on_ranks
from trainer_kit import Callback, Run
from trainer_kit.callbacks import PeerCopies
from trainer_kit.checkpoint.format import ownership
from trainer_kit.checkpoint.peer_copies import PeerCopier
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.multinode import MultiNode
from trainer_kit.strategies.single import SingleDevice

Damage = Callable[[pytest.MonkeyPatch, int], None]


class PowerCutError(RuntimeError):
    """Stands for the end of all processes."""


class Cut(Callback):
    """Ends the training after a step, once the copy that is under way is made."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == self.step:
            raise PowerCutError


class NetOfUnits(task.Net):
    """What FSDP shards: each layer is a unit."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()


def take_place(machines: int) -> int:
    """Make the processes of this machine those of several ones, with equally many each; return this one's number."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    each = size // machines
    place = {"LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each, "GROUP_RANK": rank // each}
    os.environ.update({name: str(value) for name, value in place.items()})
    return rank // each


def make_strategy(kind: str) -> Strategy:
    if kind == "fsdp":
        return FSDP(units=["head"], device="cpu", heartbeat_timeout=4.0)
    return MultiNode(device="cpu", heartbeat_timeout=4.0) if kind == "ddp" else SingleDevice("cpu")


def train(
    folder: Path,
    memory: Path,
    kind: str = "fsdp",
    machines: int = 2,
    every: int | None = 2,
    until: int | None = None,
    damage: Damage | None = None,
    callbacks: tuple[Callback, ...] = (),
    waits: bool = True,
    resume: bool | str = True,
    **changes: Any,
) -> tuple[str | None, int, list[str]]:
    """Train on the processes of this run, each machine with a folder of its own in `memory`.

    Where it `waits`, a step that copies ends when the copy is made.

    Returns:
        A checksum of the state, the step at which this start began, and what this process logged.
    """
    torch.set_num_threads(1)
    own = memory / f"machine-{take_place(machines) if kind != 'single' else 0}"
    own.mkdir(parents=True, exist_ok=True)
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_kit").addHandler(handler)
    begin = Began()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ownership, "PART_BYTES", 256)
            if waits:
                patch.setattr(PeerCopier, "begin", _begin_and_wait(PeerCopier.begin))
            strategy = make_strategy(kind)
            if damage is not None:
                damage(patch, strategy.rank)
            given = [*([] if every is None else [PeerCopies(every, own)]), Cut(until), begin, *callbacks]
            options = {
                "save_steps": 100,
                "eval_strategy": "no",
                "max_steps": 8,
                "log_level": "info",
                "async_save": False,
            } | changes
            options = {"async_save": False} | options
            trainer = task.make_trainer(folder, *given, model=NetOfUnits(), strategy=strategy, **options)
            try:
                trainer.train(resume_from_checkpoint=resume)
            except Exception as error:
                if not isinstance(error.__cause__, PowerCutError):
                    raise
                return None, begin.step, records
            optimizer = trainer.run.optimizer
            assert optimizer is not None
            averages = trainer.events.state_dict()["EMA"]
            return task.checksum(trainer.run.model.state_dict(), optimizer.state_dict(), averages), begin.step, records
    finally:
        logging.getLogger("trainer_kit").removeHandler(handler)


def _begin_and_wait(begin: Callable[..., None]) -> Callable[..., None]:
    def waits(copier: PeerCopier, *args: Any) -> None:
        begin(copier, *args)
        if copier._copying is not None:
            copier._copying.result.result(60)

    return waits


class Began(Callback):
    """Keeps the step at which a start begins."""

    step = -1

    def on_train_begin(self, run: Run) -> None:
        self.step = run.state.step


def run_copied(size: int, *args: Any, **options: Any) -> list[tuple[str | None, int, list[str]]]:
    """Train on as many processes; each stands for a machine."""
    if size == 1:
        return [train(*args, "single", **options)]
    return on_ranks(size, train, *args, **{"machines": size, **options})  # type: ignore[no-any-return]


def copied_steps(memory: Path) -> set[int]:
    """The steps of which there are copies."""
    return {int(path.name.partition("-")[0]) for path in memory.glob("*/trainer_kit-*/*")}

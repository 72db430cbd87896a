"""One start of a run for `chaos`: real processes, forked from one that has imported torch and never trains."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch._dynamo  # optimizers import it, which takes a second
from kit.ranks import free_port
from kit.saves import SaveFirst
from scenarios import task
from scenarios.moments import Death, Read, ReadStateless, ReadStream, Watch

from trainer_kit.callbacks import read_log
from trainer_kit.checkpoint.format import ownership
from trainer_kit.profiling.peak_flops import measured_peak
from trainer_kit.strategies import ddp, process_group
from trainer_kit.strategies.fsdp.strategy import FSDP

STEPS, SAVE_STEPS = 50, 4
ARGUMENTS = {
    "max_steps": STEPS, "save_steps": SAVE_STEPS, "save_total_limit": 2, "save_keep_every": 5, "eval_steps": 6,
    "metric_for_best_model": "eval_loss",
}  # fmt: skip
DATA = {"map": lambda watch: Read(watch, task.SAMPLES, "fetching"), "stream": ReadStream, "stateless": ReadStateless}
LIMIT = 120.0  # seconds for a start
ALONE = 60.0  # seconds in which a process must end by itself when another one is gone


class Start(NamedTuple):
    """One start of a run.

    Attributes:
        folder: Of the run.
        number: Of the start.
        ranks: Processes.
        deaths: By rank.
        workers: Data workers of each.
        async_save: The argument.
        saves_first: Whether a checkpoint is asked for before the first step: it replaces the one resumed from.
        data: What it reads, of `DATA`.
    """

    folder: Path
    number: int = 0
    ranks: int = 1
    deaths: Mapping[int, Death] = MappingProxyType({})
    workers: int = 0
    async_save: bool = True
    saves_first: bool = False
    data: str = "map"

    def file(self, kind: str, rank: int) -> Path:
        return self.folder / f"{self.number}-{rank}.{kind}"

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"


torch.set_num_threads(1)
measured_peak(torch.float32)  # each start would measure it at its first log, which takes as long as all its steps

STRATEGIES: dict[str, Callable[..., ddp.DDP]] = {"ddp": ddp.DDP, "fsdp": functools.partial(FSDP, units=["head"])}


def train(start: Start, rank: int, port: int) -> None:
    """What a process does; it leaves in a file what it ended with."""
    log = os.open(start.file("log", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": start.ranks, "LOCAL_WORLD_SIZE": start.ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    process_group.JOIN_SECONDS = 30
    ownership.PART_BYTES = 256  # so that all ranks write
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    warnings.filterwarnings("ignore", "train_dataset has no state_dict", UserWarning)
    watch = Watch(start.file("journal", rank), start.deaths.get(rank))
    watch.install()
    trainer = task.make_trainer(
        start.output_dir, watch, *[SaveFirst()] * start.saves_first,
        dataset=DATA[start.data](watch),
        model=task.Formats(),
        strategy=STRATEGIES[os.environ.get("CHAOS_STRATEGY", "ddp")](device="cpu", heartbeat_timeout=4.0),
        dataloader_num_workers=start.workers, async_save=start.async_save, **ARGUMENTS,
    )  # fmt: skip
    trainer.run.eval_dataset = Read(watch, 10, "evaluation")
    trainer.train(resume_from_checkpoint=True)
    records = [record for record in read_log(start.output_dir / "log.jsonl") if record["event"] == "evaluate"]
    evaluations = sorted({(record["step"], record["eval_loss"]) for record in records})
    start.file("end", rank).write_text(json.dumps({**task.results(trainer), "evaluations": evaluations}))
    ddp.shut_down()


class Outside(NamedTuple):
    """A kill from here: of these ranks, when the first one has written down so many moments."""

    ranks: list[int]
    lines: int


class Job:
    """The processes of a start."""

    def __init__(self, start: Start) -> None:
        self.start = start
        fork, port = multiprocessing.get_context("fork"), free_port()
        self.processes = [fork.Process(target=train, args=(start, rank, port)) for rank in range(start.ranks)]
        for process in self.processes:
            process.start()

    def wait(self, outside: Outside | None = None) -> list[int]:
        """Waits until all have ended; returns the ranks of those that do not."""
        end = time.monotonic() + LIMIT
        while waiting := [rank for rank, process in enumerate(self.processes) if process.is_alive()]:
            if outside is not None and self._lines(outside.ranks[0]) >= outside.lines:
                for rank in outside.ranks:
                    self.processes[rank].kill()
                outside = None
            if len(waiting) < len(self.processes):
                end = min(end, time.monotonic() + ALONE)
            if time.monotonic() > end:
                return waiting
            time.sleep(0.001)
        return []

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def is_killed(self, rank: int) -> bool:
        return self.processes[rank].exitcode == -signal.SIGKILL

    def _lines(self, rank: int) -> int:
        path = self.start.file("journal", rank)
        return path.read_bytes().count(b"\n") if path.exists() else 0

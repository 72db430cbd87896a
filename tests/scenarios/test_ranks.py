"""Several processes through the real launcher, real signals: whatever happens to one, all end, and a resume goes on."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import RankFailed, free_port, on_ranks, try_on_ranks
from scenarios import rank_task, task

from trainer_kit import Callback, NonFiniteError, Run
from trainer_kit.callbacks import read_log
from trainer_kit.checkpoint import find_checkpoints, verify
from trainer_kit.strategies.ddp import DDP

pytestmark = [pytest.mark.scenario, pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")]

TASK = rank_task.__file__
LAUNCH = ["-c", "import sys; from trainer_kit.cli.main import main; sys.exit(main())", "launch", "--cpu"]
LIMIT = 100
SAVE_STEPS, EVAL_STEPS = 5, 7  # of the task


class Job:
    """Processes of a command of this Python; all carry a mark by which they are found."""

    def __init__(self, folder: Path, *words: str | Path, **environment: str) -> None:
        self.name = uuid.uuid4().hex
        self.mark = f"TRAINER_KIT_TEST_{self.name}"
        self.files = [folder / f"{self.name}.{kind}" for kind in ("out", "err")]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), self.mark: "", **environment}
        with open(self.files[0], "wb") as out, open(self.files[1], "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=os.environ | settings, start_new_session=True,
            )  # fmt: skip

    def err(self) -> str:
        return self.files[1].read_text()

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{what} never came: {self.err()}")
            time.sleep(0.001)

    def finish(self, within: float = LIMIT) -> int:
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end within {within} s: {self.err()}") from error

    def left_behind(self) -> list[psutil.Process]:
        """What still runs of it."""
        return [process for process in psutil.process_iter() if self._has_mark(process)]

    def _has_mark(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and self.mark in process.environ()
        except psutil.Error:
            return False

    def end(self) -> None:
        for process in self.left_behind():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


class Place:
    """A training in a folder of its own, started again and again; every start has a journal of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output_dir = folder / "run"
        self.jobs: list[Job] = []
        self.starts = 0

    @property
    def journal(self) -> Path:
        """The folder of the newest start."""
        return self.folder / f"start-{self.starts}"

    def words(self, *options: object) -> list[str]:
        """The arguments of the script for another start."""
        self.starts += 1
        self.journal.mkdir()
        return [str(self.output_dir), str(self.journal), *map(str, options)]

    def start(self, *words: str | Path, **environment: str) -> Job:
        self.jobs.append(Job(self.folder, *words, **environment))
        return self.jobs[-1]

    def launch(self, ranks: int, *options: object, restarts: int = 0) -> Job:
        """Starts the script through our launcher."""
        settings = ["--num-processes", str(ranks), "--max-restarts", str(restarts), "--log-dir", self.folder / "logs"]
        return self.start(*LAUNCH, *settings, TASK, *self.words(*options))

    def resume(self, ranks: int, *options: object) -> list[dict[str, Any]]:
        """Starts it on processes that stand ready, to the end; what each rank ended with."""
        return list(on_ranks(ranks, rank_task.train, self.words(*options)))

    def events(self, rank: int, *kinds: str) -> list[dict[str, Any]]:
        """What a rank of the newest start has written down so far."""
        path = self.journal / f"rank-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if not kinds or event["event"] in kinds]

    def last_step(self, rank: int = 0) -> int:
        """The last step of a rank in the newest start."""
        return int(self.events(rank)[-1]["step"])

    def digests(self, ranks: int) -> set[str]:
        return {self.events(rank, "end")[0]["digest"] for rank in range(ranks)}

    def checkpoints(self) -> set[int]:
        """The steps of all checkpoints, each of which is whole."""
        found = find_checkpoints(self.output_dir) if self.output_dir.exists() else []
        for checkpoint in found:
            verify(checkpoint)
        return {int(checkpoint.name.rpartition("-")[2]) for checkpoint in found}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for job in place.jobs:
        job.end()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of a run on two ranks that nothing disturbs, by its options."""
    known: dict[tuple[object, ...], str] = {}

    def digest(*options: object) -> str:
        if options not in known:
            first, second = Place(tmp_path_factory.mktemp("straight")).resume(2, *options)
            assert first["digest"] == second["digest"]
            known[options] = first["digest"]
        return known[options]

    return digest


def figures(output_dir: Path) -> list[tuple[Any, ...]]:
    """All that was logged and evaluated, but for the times."""
    names = ("loss", "grad_norm", "eval_loss", "learning_rate")
    records = [record for record in read_log(output_dir / "log.jsonl") if record["event"] in ("log", "evaluate")]
    return [(record["event"], record["step"], *(record.get(name) for name in names)) for record in records]


# Two and three ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_runs_of_one_layout_end_with_the_same_bits(tmp_path: Path, place: Place, ranks: int) -> None:
    job = place.launch(ranks)
    assert job.finish() == 0, job.err()
    other = Place(tmp_path / "other")
    other.folder.mkdir()
    others = other.resume(ranks)
    assert {result["digest"] for result in others} == place.digests(ranks)
    assert len(place.digests(ranks)) == 1
    assert figures(place.output_dir) == figures(other.output_dir)
    assert {event for event, *_ in figures(place.output_dir)} == {"log", "evaluate"}


@pytest.mark.parametrize(
    ("layouts", "alone"),
    [
        ([(2, 3, 2), (1, 4, 3), (3, 2, 2)], 12),  # ranks, batch size, accumulation: always 12 samples a step
        ([(2, 4, 2), (1, 3, 1), (3, 5, 2)], None),
    ],
    ids=["same steps", "other steps"],
)
def test_a_resume_with_another_layout_sees_each_sample_once(
    place: Place, layouts: list[tuple[int, int, int]], alone: int | None
) -> None:
    epochs, step = 3, 0
    task_options = ("--model", "exact", "--epochs", epochs)
    counted: list[int] = []
    for ranks, batch_size, accumulation in layouts:
        step = step + 7 if ranks < 3 else -1
        layout = ("--batch-size", batch_size, "--accumulation", accumulation, "--until", step)
        results = place.run(ranks, *task_options, *layout)
        first, *others = [place.events(rank, "counted") for rank in range(ranks)]
        for other in others:
            assert [event["numbers"] for event in other] == [event["numbers"] for event in first]
        counted += [number for event in first for number in event["numbers"]]
    assert [sorted(counted[start : start + task.SAMPLES]) for start in range(0, len(counted), task.SAMPLES)] == [
        list(range(task.SAMPLES))
    ] * epochs
    if alone is not None:
        other_place = place.beside()
        (expected,) = other_place.run(1, *task_options, "--batch-size", alone, "--accumulation", 1)
        for result in results:
            assert result["parameters"] == pytest.approx(expected["parameters"], rel=0, abs=1e-9)
            assert result["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-9)
        for ours, theirs in zip(figures(place.output_dir), figures(other_place.output_dir), strict=True):
            assert ours[:2] == theirs[:2]
            assert ours[2:5] == pytest.approx(theirs[2:5], rel=0, abs=1e-9)


# Signals to one rank


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_to_one_rank_saves_once_and_ends_all(
    place: Place, straight: Straight, number: signal.Signals, workers: int
) -> None:
    """Five times at random moments, 20 in all; each start goes on from what the one before has left."""
    options = ("--epochs", EPOCHS, "--workers", workers)
    chance = random.Random(f"{number} {workers}")
    moments = ["step", "step", "evaluating", "saving", chance.choice(["evaluating", "saving"])]
    for moment in chance.sample(moments, len(moments)):
        before, begin, rank = place.checkpoints(), max([0, *place.checkpoints()]), chance.randrange(2)
        job = place.launch(2, *options, "--pause", PAUSE)
        wanted = begin + chance.randint(2, 9)
        job.wait_until(lambda: any(e["step"] >= wanted for e in place.events(0, moment)), f"{moment} {wanted}")  # noqa: B023
        time.sleep(chance.random() * PAUSE * 4)
        os.kill(place.pid(rank), number)
        assert job.finish() == 143, job.err()
        last = place.last_step(0)
        assert place.last_step(1) == last >= wanted
        regular = set(range(begin - begin % SAVE_STEPS + SAVE_STEPS, last, SAVE_STEPS))
        assert place.checkpoints() - before == (regular | {last}) - before
        assert f"left at step {last} of {place.total_steps}" in job.err()
    results = place.run(2, *options)
    assert {result["digest"] for result in results} == {straight("--epochs", EPOCHS)}
    assert figures(place.output_dir) == straight.figures("--epochs", EPOCHS)

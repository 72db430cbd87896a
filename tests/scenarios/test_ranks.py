"""Several processes through the real launcher, real signals: whatever happens to one, all end, and a resume goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from kit.preloaded import PreloadedPython
from kit.ranks import free_port, on_ranks, try_on_ranks
from scenarios import rank_task, task

from trainer_kit import Callback, NonFiniteError, Run
from trainer_kit.callbacks import read_log
from trainer_kit.checkpoint import find_checkpoints, verify

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]

TASK = Path(rank_task.__file__)
LAUNCHER = ("-m", "trainer_kit", "launch", "--cpu")
LIMIT = 100
EPOCHS, STEPS = 40, 160  # on two ranks
SAVE_STEPS = 5
PAUSE = 0.02  # seconds


class Job:
    """A command of this Python with all its processes, which carry a mark by which they are found.

    A `preloaded` one is a process that has imported torch before.
    """

    def __init__(self, folder: Path, *words: str | Path, preloaded: bool, **environment: str) -> None:
        self.mark = f"TEST_{uuid.uuid4().hex}"
        self.out, self.err = (folder / f"{self.mark}.{kind}" for kind in ("out", "err"))
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), self.mark: "", **environment}
        command, env = [*map(str, words)], os.environ | settings
        self.process: PreloadedPython | subprocess.Popen[bytes]
        if preloaded:
            self.process = PreloadedPython(command, self.out, self.err, env, _open, (folder / self.mark,))
            return
        with open(self.out, "wb") as out, open(self.err, "wb") as err:  # not pipes, which fill up
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, start_new_session=True,
            )  # fmt: skip

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{what} never came: {self.err.read_text()}")
            time.sleep(0.01)

    def finish(self) -> tuple[int, str]:
        """Waits for the end, after which nothing may run; the exit code, and what was written to stderr."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end within {LIMIT} s: {self.err.read_text()}") from error
        self.ended = time.time()
        _, alive = psutil.wait_procs(self.processes(), timeout=10)
        assert not alive, [process.cmdline() for process in alive]
        return code, self.err.read_text()

    def seconds_since(self, moment: float) -> float:
        """From a moment of the clock to the end."""
        return self.ended - moment

    def processes(self) -> list[psutil.Process]:
        """All that run now."""
        return [process for process in psutil.process_iter() if self._is_own(process)]

    def _is_own(self, process: psutil.Process) -> bool:
        try:  # what is forked has the files of the first one, but no environment that others can read
            return self.mark in process.environ() or any(self.mark in file.path for file in process.open_files())
        except psutil.Error:
            return False

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def _open(mark: Path) -> None:
    """Keep a file open, which the processes that are forked from this one have open too."""
    os.open(mark, os.O_WRONLY | os.O_CREAT)


def wait_until(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.01)


class Ending(NamedTuple):
    """What must be the same, to the bit, for two runs that ended at the same step."""

    digests: tuple[str, ...]
    figures: str


class Place:
    """A training in a folder of its own, started again and again; each start has a journal of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output_dir = folder / "run"
        self.jobs: list[Job] = []
        self.starts = 0

    def words(self, *options: object) -> list[str]:
        """The arguments of the script for another start."""
        self.starts += 1
        return [str(self.output_dir), str(self.journal), *map(str, options)]

    def start(self, *words: str | Path, preloaded: bool = False, **environment: str) -> Job:
        self.jobs.append(Job(self.folder, *words, preloaded=preloaded, **environment))
        return self.jobs[-1]

    def launch(self, ranks: int, *options: object, restarts: int = 0, preloaded: bool = True) -> Job:
        """Starts the script with `trainer-kit launch`."""
        settings = ["--num-processes", str(ranks), "--max-restarts", str(restarts), "--log-dir", self.folder / "logs"]
        return self.start(*LAUNCHER, *settings, TASK, *self.words(*options), preloaded=preloaded)

    def run(self, ranks: int, *options: object) -> list[dict[str, Any]]:
        """The same on processes that stand ready, to the end; what each rank ended with."""
        words = self.words(*options)
        return [rank_task.train(words)] if ranks == 1 else list(on_ranks(ranks, rank_task.train, words))

    @property
    def journal(self) -> Path:
        """The folder of the newest start's journal."""
        return self.folder / f"journal-{self.starts}"

    def events(self, rank: int, *kinds: str) -> list[dict[str, Any]]:
        """What a rank of the newest start has written down so far."""
        path = self.journal / f"rank-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if not kinds or event["event"] in kinds]

    def steps(self, rank: int, kind: str) -> list[int]:
        """The steps at which a rank of the newest start did something."""
        return [event["step"] for event in self.events(rank, kind)]

    def checkpoints(self) -> set[int]:
        """The steps of all checkpoints, each of which is whole."""
        found = find_checkpoints(self.output_dir) if self.output_dir.exists() else []
        for checkpoint in found:
            verify(checkpoint)
        return {int(checkpoint.name.rpartition("-")[2]) for checkpoint in found}

    def figures(self) -> list[tuple[float, ...]]:
        """What was logged and evaluated: step, loss, gradient norm, learning rate, loss of an evaluation."""
        names = ("loss", "grad_norm", "learning_rate", "eval_loss")
        records = read_log(self.output_dir / "log.jsonl")
        rows = [(record["step"], *(record.get(name, math.nan) for name in names)) for record in records]
        return [row for row in rows if not all(map(math.isnan, row[1:]))]

    def ending(self, ranks: int = 2) -> Ending:
        """How the newest start ended, in which all ranks have the same weights."""
        digests = tuple(self.events(rank, "end")[0]["digest"] for rank in range(ranks))
        assert len(set(digests)) == 1
        return Ending(digests, repr(self.figures()))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for job in place.jobs:
        job.end()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """How a run on two ranks ends that nothing disturbs."""
    place = Place(tmp_path_factory.mktemp("straight"))
    place.run(2, "--epochs", EPOCHS)
    assert place.steps(0, "step")[-1] == STEPS
    return place.ending()


# Layouts


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_runs_of_one_layout_end_with_the_same_bits(tmp_path_factory: Any, place: Place, ranks: int) -> None:
    code, err = place.launch(ranks, "--epochs", 6, preloaded=ranks == 3).finish()
    assert code == 0, err
    other = Place(tmp_path_factory.mktemp("other"))
    other.run(ranks, "--epochs", 6)
    assert other.ending(ranks) == place.ending(ranks)
    end = place.steps(0, "step")[-1] + 1
    assert {step for step, *_ in place.figures()} == {*range(3, end, 3), *range(7, end, 7)}


@pytest.mark.parametrize(
    ("layouts", "alone"),
    [
        ([(2, 3, 2), (1, 4, 3), (3, 2, 2)], 12),  # ranks, batch size, accumulation: always 12 samples a step
        ([(2, 4, 2), (1, 3, 1), (3, 5, 2)], None),
    ],
    ids=["same steps", "other steps"],
)
def test_a_resume_with_another_layout_sees_each_sample_once(
    tmp_path_factory: Any, place: Place, layouts: list[tuple[int, int, int]], alone: int | None
) -> None:
    epochs = 3
    options = ("--model", "exact", "--epochs", epochs)
    counted: list[int] = []
    for ranks, batch_size, accumulation in layouts:
        until = place.steps(0, "step")[-1] + 7 if counted else 7
        layout = ("--batch-size", batch_size, "--accumulation", accumulation)
        results = place.run(ranks, *options, *layout, *(("--until", until) if ranks < 3 else ()))
        for event in place.events(0, "counted"):
            counted += event["numbers"]
            assert event["shares"] == pytest.approx([1 / len(event["shares"])] * len(event["shares"]), rel=1e-12)
    by_epoch = [counted[start : start + task.SAMPLES] for start in range(0, len(counted), task.SAMPLES)]
    assert [sorted(numbers) for numbers in by_epoch] == [list(range(task.SAMPLES))] * epochs
    if alone is not None:
        other = Place(tmp_path_factory.mktemp("alone"))
        (expected,) = other.run(1, *options, "--batch-size", alone, "--accumulation", 1)
        for result in results:
            assert result["parameters"] == pytest.approx(expected["parameters"], rel=0, abs=1e-9)
            assert result["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-9)
        assert len(place.figures()) == len(other.figures()) == 6
        for ours, theirs in zip(place.figures(), other.figures(), strict=True):
            assert ours == pytest.approx(theirs, rel=0, abs=1e-9, nan_ok=True)


def test_fewer_processes_keep_the_samples_of_a_step(tmp_path_factory: Any, place: Place) -> None:
    """3 -> 2 -> 3: each sample once in the steps of an undisturbed run, and no trace of the change afterwards."""
    options = ("--model", "exact", "--epochs", 3, "--batch-size", 2, "--accumulation", 2)
    whole = Place(tmp_path_factory.mktemp("whole"))
    expected = whole.run(3, *options)[0]
    counted: list[set[int]] = []
    for ranks, until in ((3, 7), (2, 14), (3, -1)):
        if until < 0:
            other = Place(tmp_path_factory.mktemp("other"))
            shutil.copytree(place.output_dir, other.output_dir)
        results = place.run(ranks, *options, "--until", until)
        for event in place.events(0, "counted"):
            counted.append({*event["numbers"]})
            assert event["shares"] == pytest.approx([1 / len(event["shares"])] * len(event["shares"]), rel=1e-12)
    assert counted == [{*event["numbers"]} for event in whole.events(0, "counted")]
    for result in results:
        assert result["parameters"] == pytest.approx(expected["parameters"], rel=0, abs=1e-12)
    assert [row[3] for row in place.figures()] == [row[3] for row in whole.figures()]  # learning rates
    on_ranks(3, train_scaled, other.words(*options))  # the layout that these processes have by themselves
    assert other.ending(3).digests == place.ending(3).digests


def train_scaled(words: list[str]) -> None:
    rank_task.train(words, on_resize="scale")


# Signals


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_to_one_rank_saves_once_and_ends_all(
    place: Place, straight: Ending, number: signal.Signals, workers: int
) -> None:
    """Five times at random moments, so that it is 20 times in all; each start resumes where the last one left.

    The first start is the launcher's, the others are of processes that stand ready.
    """
    options = ("--epochs", EPOCHS, "--workers", workers)
    chance = random.Random(f"{number} {workers}")
    moments = ["step", "step", "evaluating", "saving", chance.choice(["evaluating", "saving"])]
    for start, moment in enumerate(chance.sample(moments, 5)):
        before = place.checkpoints()
        begin = max(before, default=0)
        wanted = begin + chance.randint(2, 9)

        def send(ready: Callable[[Callable[[], bool], str], None]) -> None:
            ready(lambda: max(place.steps(0, moment), default=0) >= wanted, f"{moment} {wanted}")  # noqa: B023
            time.sleep(chance.random() * 4 * PAUSE)
            os.kill(place.events(chance.randrange(2), "begin")[0]["pid"], number)

        if start == 0:
            job = place.launch(2, *options, "--pause", PAUSE)
            send(job.wait_until)
            code, err = job.finish()
            assert code == 143, err
            assert f"left at step {place.steps(0, 'step')[-1]} of {STEPS}; the newest checkpoint is " in err
        else:
            with ThreadPoolExecutor(1) as thread:
                words = place.words(*options, "--pause", PAUSE)
                sent = thread.submit(send, wait_until)
                failed = try_on_ranks(2, rank_task.train, words)
                sent.result()
            assert [getattr(each.error, "code", each) for each in failed] == [143, 143]
        assert place.steps(0, "begin") == place.steps(1, "begin") == [begin]
        last = place.steps(0, "step")[-1]
        assert place.steps(1, "step")[-1] == last
        regular = range(begin - begin % SAVE_STEPS + SAVE_STEPS, last + 1, SAVE_STEPS)
        assert place.checkpoints() == before | {*regular, last}
    place.run(2, *options)
    assert place.ending() == straight


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_to_the_launcher_saves_and_ends_all(place: Place, workers: int) -> None:
    """Five times with steps as fast as can be, and once while the ranks are starting."""
    options = ("--epochs", 100_000, "--save-steps", 1000, "--workers", workers)
    chance = random.Random(workers)
    for _ in range(5):
        begin = max(place.checkpoints(), default=0)
        job = place.launch(2, *options)
        wanted = begin + chance.randint(1, 30)
        job.wait_until(lambda: max(place.steps(1, "step"), default=0) >= wanted, f"step {wanted}")  # noqa: B023
        time.sleep(chance.random() * 0.1)
        job.process.send_signal(signal.SIGTERM)
        code, err = job.finish()
        assert code == 143, err
        assert place.steps(0, "begin") == place.steps(1, "begin") == [begin]
        last = place.steps(0, "step")[-1]
        assert place.steps(1, "step")[-1] == max(place.checkpoints()) == last
    before = place.checkpoints()
    job = place.launch(2, *options, preloaded=False)  # to be hit while it imports
    launcher = psutil.Process(job.process.pid)
    job.wait_until(lambda: len(launcher.children()) == 2, "two ranks")
    time.sleep(chance.random() * 3)
    job.process.send_signal(signal.SIGTERM)
    code, err = job.finish()
    assert code == 143, err
    assert place.checkpoints() >= before


def test_ctrl_c_saves_and_ends_all(place: Place, straight: Ending) -> None:
    job = place.launch(2, "--epochs", EPOCHS, "--pause", PAUSE, preloaded=False)
    job.wait_until(lambda: 8 in place.steps(0, "step"), "step 8")
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
    code, err = job.finish()
    assert code == 130, err
    assert max(place.checkpoints()) == place.steps(0, "step")[-1] == place.steps(1, "step")[-1]
    place.run(2, "--epochs", EPOCHS)
    assert place.ending() == straight


# Failures

FAILS_AT = 12
PATIENCE = ("--heartbeat", 5)


# On a busy machine the launcher may end it before Python has come to its end.
RAISED = r"failed (with exit code 1|and had to be ended)"


@pytest.mark.parametrize(
    ("how", "rank", "options", "code", "last", "within"),
    [
        ("raise", 0, (), 1, rf"rank 0 on \S+ {RAISED}:\nTraceback .*\nArithmeticError: told to fail", 10),
        ("raise", 1, (), 1, rf"rank 1 on \S+ {RAISED}:\nTraceback .*\nArithmeticError: told to fail", 10),
        ("exit", 0, (), 3, r"rank 0 on \S+ left with exit code 3", 10),
        ("exit", 1, (), 3, r"rank 1 on \S+ left with exit code 3", 10),
        ("kill", 0, ("--workers", 2), 137, r"rank 0 on \S+ was killed by SIGKILL \(.*\)", 10),
        ("kill", 1, (), 137, r"rank 1 on \S+ was killed by SIGKILL \(.*\)", 10),
        ("stop", 0, PATIENCE, 1, r".*LostProcessError: rank 0 \(.*\) has not answered .* \(it is stopped\);.*", 20),
        ("stop", 1, PATIENCE, 1, r".*LostProcessError: rank 1 \(.*\) has not answered .* \(it is stopped\);.*", 20),
        (
            "sleep", 1, (*PATIENCE, "--ddp-timeout", 10), 1,
            r".*LostProcessError: rank 1 \(.*\) has been for [\d.]+ s in _fail \(scenarios/rank_task.py:\d+\);.*", 30,
        ),
    ],
    ids=lambda value: str(value) if value in (0, 1, "raise", "exit", "kill", "stop", "sleep") else "",
)  # fmt: skip
def test_a_rank_that_fails_ends_all_and_is_named(
    place: Place, straight: Ending, how: str, rank: int, options: tuple[Any, ...], code: int, last: str, within: float
) -> None:
    job = place.launch(2, "--epochs", EPOCHS, "--trouble", how, rank, FAILS_AT, *options)
    left, err = job.finish()
    assert left == code, err
    assert re.fullmatch(last, err.rpartition("trainer-kit launch: ")[2].strip(), re.DOTALL), err
    assert job.seconds_since(place.events(rank, "trouble")[0]["time"]) < within
    waited = re.search(
        rf"^rank {rank} \(.*\) has been for [\d.]+ s in _fail .*, while rank \d \(.*\) has been", err, re.M
    )
    assert bool(waited) == (how == "sleep"), err
    assert place.checkpoints() == {5, 10}
    place.run(2, "--epochs", EPOCHS)
    assert place.ending() == straight


def test_a_sharded_model_survives_a_rank_that_dies_freezes_or_is_told_to_end(place: Place, tmp_path: Path) -> None:
    """One training that meets all three, and one that is not disturbed."""
    options = ("--fsdp", "--epochs", 8, "--waits-for-saves", *PATIENCE)
    for how, code, sentence, last in (
        ("kill", 137, r"rank 1 on \S+ was killed by SIGKILL", FAILS_AT - 2),
        ("stop", 1, r"LostProcessError: rank 1 \(.*\) has not answered .* \(it is stopped\)", FAILS_AT + 3),
    ):
        left, err = place.launch(2, *options, "--trouble", how, 1, last + 2).finish()
        assert left == code, err
        assert re.search(sentence, err), err
        assert max(place.checkpoints()) == last
    job = place.launch(2, *options, "--pause", PAUSE)
    job.wait_until(lambda: max(place.steps(1, "step"), default=0) >= FAILS_AT + 6, "a later step")
    os.kill(place.events(1, "begin")[0]["pid"], signal.SIGTERM)
    left, err = job.finish()
    assert left == 143, err
    assert place.steps(0, "begin") == place.steps(1, "begin") == [FAILS_AT + 3]
    assert max(place.checkpoints()) == place.steps(0, "step")[-1] == place.steps(1, "step")[-1]
    place.run(2, *options)
    (tmp_path / "straight").mkdir()
    straight = Place(tmp_path / "straight")
    straight.run(2, *options)
    assert place.ending() == straight.ending()


def test_a_process_that_waits_for_a_lost_one_finishes_its_checkpoint_first(place: Place) -> None:
    options = ("--epochs", EPOCHS, "--trouble", "stop", 1, SAVE_STEPS + 2, "--slow-write", 15, *PATIENCE)
    code, err = place.launch(2, *options).finish()
    assert code == 1, err
    assert "LostProcessError: rank 1" in err
    assert place.checkpoints() == {SAVE_STEPS}


def test_a_frozen_rank_is_found_within_a_minute_by_default(place: Place, tmp_path: Path) -> None:
    """Rank 0 of one run and rank 2 of another one at the same time: most of it is waiting."""
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    frozen = {0: place, 2: other}
    other.jobs = place.jobs  # which end with the test
    jobs = [each.launch(3, "--epochs", EPOCHS, "--trouble", "stop", rank, FAILS_AT) for rank, each in frozen.items()]
    for job, (rank, each) in zip(jobs, frozen.items(), strict=True):
        code, err = job.finish()
        assert code == 1, err
        assert re.search(rf"LostProcessError: rank {rank} \(.*\) has not answered .* \(it is stopped\)", err), err
        assert 25 < job.seconds_since(each.events(rank, "trouble")[0]["time"]) < 60


# Restarts


def test_a_rank_that_dies_once_is_started_anew_and_goes_on(place: Place, straight: Ending) -> None:
    trouble = ("--trouble", "kill", 1, FAILS_AT)
    code, err = place.launch(2, "--epochs", EPOCHS, "--by-itself", *trouble, restarts=2).finish()
    assert code == 0, err
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL .*; restart 1 of 2, from the checkpoint of step 10\n", err)
    assert place.steps(0, "begin") == place.steps(1, "begin") == [0, 10]
    assert place.ending() == straight


def test_a_rank_that_always_fails_is_not_started_for_ever(place: Place) -> None:
    trouble = ("--trouble", "raise", 1, FAILS_AT, "--stubborn")
    code, err = place.launch(2, "--epochs", EPOCHS, "--by-itself", *trouble, restarts=2).finish()
    assert code == 1, err
    assert "not restarted: 2 restarts are made, and no checkpoint is newer than that of step 10 since the last" in err
    assert place.steps(0, "begin") == place.steps(1, "begin") == [0, 10, 10]
    assert err.rstrip().endswith("\nArithmeticError: told to fail")


# Other launchers


def test_torchrun_trains_the_same(place: Place, straight: Ending) -> None:
    settings = ("--nproc-per-node", "2", "--master-port", str(free_port()))
    code, err = place.start("-m", "torch.distributed.run", *settings, TASK, *place.words("--epochs", EPOCHS)).finish()
    assert code == 0, err
    assert place.ending() == straight


def test_slurm_trains_the_same(place: Place, straight: Ending) -> None:
    words = place.words("--epochs", EPOCHS)
    job = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    for each in [place.start(TASK, *words, **job, **variables) for variables in places]:
        code, err = each.finish()
        assert code == 0, err
    assert place.ending() == straight


# What one process alone wants or sees


class Ask(Callback):
    """Asks for something on one process only."""

    def __init__(self, what: str, rank: int, step: int) -> None:
        self.what, self.rank, self.step = what, rank, step

    def on_step_end(self, run: Run) -> None:
        if run.strategy.rank == self.rank and run.state.step == self.step:
            setattr(run.requests, self.what, True)


def train_and_ask(words: list[str], what: str, rank: int, step: int) -> None:
    rank_task.train(words, Ask(what, rank, step))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "event", "steps"),
    [
        ("log", "logged", [3, 4, 6]),
        ("evaluate", "evaluating", [4]),
        ("save", "saved", [4, 5]),
        ("stop", "step", [1, 2, 3, 4]),
    ],
    ids=["log", "evaluate", "save", "stop"],
)
def test_what_one_process_asks_for_all_do_after_that_step(
    place: Place, what: str, event: str, steps: list[int], rank: int
) -> None:
    on_ranks(2, train_and_ask, place.words(), what, rank, 4)
    for each in range(2):
        assert [step for step in place.steps(each, event) if step <= 6] == steps


class Spoil(Callback):
    """Makes the loss of one process NaN in one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_begin(self, run: Run) -> None:
        if run.strategy.rank == self.rank:
            run.model.register_forward_hook(lambda model, inputs, output: self._spoilt(run, output))

    def _spoilt(self, run: Run, output: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return output | {"loss": output["loss"] * torch.nan} if run.state.step == self.step else output


def train_and_spoil(words: list[str], nonfinite: str) -> dict[str, Any]:
    return rank_task.train(words, Spoil(1, 4), nonfinite=nonfinite)


def test_a_step_that_is_not_finite_on_one_process_is_left_out_on_all(place: Place) -> None:
    results = on_ranks(2, train_and_spoil, place.words("--model", "exact"), "skip")
    assert [result["skipped_steps"] for result in results] == [1, 1]
    assert results[0]["parameters"] == results[1]["parameters"]
    assert all(map(math.isfinite, [*results[0]["parameters"], results[0]["loss"]]))
    assert place.steps(0, "step") == place.steps(1, "step") == list(range(1, 25))


def test_a_step_that_is_not_finite_on_one_process_stops_all(place: Place) -> None:
    for failed in try_on_ranks(2, train_and_spoil, place.words("--model", "exact"), "stop"):
        assert isinstance(failed.error, NonFiniteError)
        assert str(failed.error).startswith("step 5 is not finite: loss nan")

"""Real processes, real signals: what is left is always enough to go on, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from kit.preloaded import PreloadedPython

pytestmark = [pytest.mark.scenario, pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")]

TASK = Path(__file__).with_name("task.py")
LIMIT = 120


Process: TypeAlias = "PreloadedPython | subprocess.Popen[str]"


def start(folder: Path, *options: str) -> PreloadedPython:
    """Starts the task in a process that leads a session."""
    name = f"{folder.name}-{uuid.uuid4().hex}"
    out, err = (folder.with_name(f"{name}.{kind}") for kind in ("out", "err"))
    return PreloadedPython([str(TASK), str(folder), *options], out, err)


def finish(process: Process) -> tuple[int | None, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(path: Path, process: Process) -> None:
    wait_until(path.exists, str(path), process)


def wait_for_step(folder: Path, step: int, process: Process) -> None:
    """Waits for the mark of this step or a later one: the checkpoint that is gone on from may be newer."""
    wait_until(lambda: any(last_step(mark) >= step for mark in folder.iterdir()), f"step {step}", process)


def wait_until(ready: Callable[[], bool], what: str, process: Process) -> None:
    end = time.monotonic() + LIMIT
    while not ready():
        if process.poll() == 0:
            return  # it had less left to do than it takes to wait for it
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"{what} never came: {process.communicate()[1]}")
        time.sleep(0.001)


def last_step(path: Path) -> int:
    return int(path.name.split("-")[1])


def marks(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    code, out, err = finish(start(tmp_path_factory.mktemp("straight")))
    assert code == 0, err
    return out.strip()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path, expected: str, workers: str) -> None:
    chance = random.Random(int(workers))
    kills = 0
    for step in (2, 9, 16, 22):
        after = 0.01 * (1 - chance.random())  # in a step, an evaluation, or anywhere in a save
        process = start(tmp_path / "run", "--workers", workers, "--alarm", str(step), str(after))
        kills += finish(process)[0] == -signal.SIGALRM
    assert kills >= 2
    code, out, err = finish(start(tmp_path / "run", "--workers", workers))
    assert code == 0, err
    assert out.strip() == expected
    assert not list((tmp_path / "run").glob(".staging*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_finishes_the_step_saves_and_leaves(
    tmp_path: Path, expected: str, number: signal.Signals, code: int
) -> None:
    marked = marks(tmp_path / "marks")
    process = start(tmp_path / "run", "--marks", str(marked), "--workers", "2")
    wait_for_step(marked, 5, process)
    process.send_signal(number)
    left, _, err = finish(process)
    assert left == code, err
    last = max(map(last_step, marked.iterdir()))
    assert (tmp_path / "run" / f"checkpoint-{last}" / "manifest.json").is_file()
    left, out, err = finish(start(tmp_path / "run"))
    assert left == 0, err
    assert out.strip() == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_workers_too_finishes_the_step(tmp_path: Path, expected: str, number: signal.Signals) -> None:
    """As some schedulers do."""
    marked = marks(tmp_path / "marks")
    process = start(tmp_path / "run", "--marks", str(marked), "--workers", "2")
    wait_for_step(marked, 5, process)
    os.killpg(process.pid, number)
    left, _, err = finish(process)
    assert left == 143, err
    left, out, err = finish(start(tmp_path / "run"))
    assert left == 0, err
    assert out.strip() == expected


def test_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(TASK.parent)!r})\n"
        "from pathlib import Path\n"
        "import task\n"
        "from trainer_kit import Callback\n"
        "class Slow(Callback):\n"
        "    def on_substep_end(self, run):\n"
        f"        Path({str(tmp_path)!r}, 'in-step').touch()\n"
        "        time.sleep(60)\n"
        f"task.make_trainer(Path({str(tmp_path)!r}) / 'run', Slow()).train()\n"
    )
    process = subprocess.Popen([sys.executable, str(slow)], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "in-step", process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # the first one waits for the step
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert time.monotonic() - begin < 30
    assert code in (130, -signal.SIGINT), err


def test_interrupt_in_an_evaluation_saves_and_evaluates_on_resume(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, json\n"
        f"sys.path.insert(0, {str(TASK.parent)!r})\n"
        "from pathlib import Path\n"
        "import task, torch\n"
        "folder = Path(sys.argv[1])\n"
        "class SlowEval(task.Noisy):\n"
        "    def __getitem__(self, index):\n"
        "        if len(sys.argv) > 2:\n"
        "            (folder / 'evaluating').touch()\n"
        "            time.sleep(1)\n"
        "        return super().__getitem__(index)\n"
        "folder.mkdir(exist_ok=True)\n"
        "trainer = task.make_trainer(folder / 'run', max_steps=5, save_steps=100)\n"
        "trainer.run.eval_dataset = SlowEval(10)\n"
        "trainer.train(resume_from_checkpoint=True)\n"
        "print(task.digest(trainer))\n"
    )

    def run(folder: Path, *slow: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), str(folder), *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    process = run(tmp_path / "a", "slow")
    wait_for(tmp_path / "a" / "evaluating", process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert (tmp_path / "a" / "run" / "checkpoint-4").is_dir()
    code, resumed, err = finish(run(tmp_path / "a"))
    assert code == 0, err
    assert "eval_loss" in (tmp_path / "a" / "run" / "log.jsonl").read_text()
    code, straight, err = finish(run(tmp_path / "b"))
    assert code == 0, err
    assert resumed == straight

"""One training at a time in a folder, whoever started it and however it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from kit.preloaded import PreloadedPython
from scenarios.task import make_trainer

from trainer_kit import Callback, Run
from trainer_kit.callbacks import read_log
from trainer_kit.checkpoint.format import commit
from trainer_kit.errors import CutOffError, FolderInUseError
from trainer_kit.utils import run_lock
from trainer_kit.utils.membership_claim import MembershipPlace
from trainer_kit.utils.run_lock import NAME, RunLock, ended_holder, holder_of

HERE = Path(__file__).parents[1]
SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from scenarios.task import Marker, make_trainer
from trainer_kit import Callback

class Slow(Callback):
    def on_step_end(self, run):
        time.sleep({pause})

trainer = make_trainer(Path({folder!r}), Marker(Path({marks!r})), Slow(), log_level="info")
trainer.train(resume_from_checkpoint={resume})
print("ended at", trainer.run.state.step)
"""
Process: TypeAlias = "PreloadedPython | subprocess.Popen[str]"


class Runs:
    """Starts `python train.py` in one folder; a process may have imported torch before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marks = folder / "run", folder / "marks"
        self.marks.mkdir()
        self.started: list[Process] = []

    def start(self, pause: float = 0.0, resume: bool | None = None, preloaded: bool = True) -> Process:
        script = self.folder.with_name(f"train-{len(self.started)}.py")
        script.write_text(
            SCRIPT.format(here=str(HERE), folder=str(self.folder), marks=str(self.marks), pause=pause, resume=resume)
        )
        process: Process
        if preloaded:
            process = PreloadedPython([str(script)], script.with_suffix(".out"), script.with_suffix(".err"))
        else:
            process = subprocess.Popen([sys.executable, str(script)], stdout=-1, stderr=-1, text=True)
        self.started.append(process)
        return process

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not (self.marks / f"step-{step}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def told(process: Process) -> str:
    out, error = process.communicate(timeout=200)
    return f"{process.returncode}: {out}{error}"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.scenario
def test_a_second_start_is_refused_before_anything_is_touched(runs: Runs) -> None:
    """Also where the holder stands still, and goes on later."""
    first = runs.start(pause=0.3)
    runs.wait_for(5)
    while not (runs.folder / "checkpoint-4").is_dir():
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGSTOP)
    before = files(runs.folder)
    assert "checkpoint-4/manifest.json" in before
    for resume in (None, True):
        second = told(runs.start(resume=resume))
        assert "FolderInUseError: output_dir=" in second
        assert f"(process {first.pid}), since 20" in second
        assert f"it is stopped: kill -CONT {first.pid} lets it continue" in second
    assert files(runs.folder) == before
    os.kill(first.pid, signal.SIGCONT)
    assert told(first).startswith("0: ended at 24")
    records = read_log(runs.folder / "log.jsonl")
    assert [record["event"] for record in records].count("start") == 1
    assert not (runs.folder / NAME).exists()


@pytest.mark.scenario
def test_two_starts_at_the_same_time_leave_one_run(runs: Runs) -> None:
    ends = [told(process) for process in [runs.start(pause=0.3), runs.start(pause=0.3)]]
    assert sorted(end.startswith("0: ended at 24") for end in ends) == [False, True]
    assert sum("is in use" in end for end in ends) == 1
    assert not list(runs.folder.glob("earlier-*"))


@pytest.mark.scenario
def test_a_killed_holder_is_followed_at_once(runs: Runs) -> None:
    first = runs.start(pause=0.3, preloaded=False)
    runs.wait_for(6)
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but is a zombie
    begin = time.monotonic()
    second = runs.start(resume=True)
    assert told(second).startswith("0: ended at 24")
    assert time.monotonic() - begin < 60
    assert (runs.folder / "checkpoint-24").is_dir()


def lock_of_another_machine(folder: Path, host: str = "elsewhere", age: float = 0.0) -> Path:
    """A lock as a run on another machine leaves it."""
    lock = RunLock(folder)
    lock.acquire()
    content = json.loads((folder / NAME).read_text())
    lock.release()
    path = folder / NAME
    path.write_text(json.dumps(content | {"host": host, "token": "theirs"}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats in quick succession."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.2)


def test_another_machine_is_taken_over_after_the_stated_time(quick: None, tmp_path: Path) -> None:
    lock_of_another_machine(tmp_path, age=run_lock.DEAD_AFTER + 1)
    assert holder_of(tmp_path) is None
    lock = RunLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()
    lock.release()


@pytest.mark.slow
def test_another_machine_that_is_silent_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_lock, "DEAD_AFTER", 2.0)
    lock_of_another_machine(tmp_path)
    begin = time.monotonic()
    lock = RunLock(tmp_path)
    lock.acquire()
    assert 1.5 < time.monotonic() - begin < 20
    lock.release()
    assert "elsewhere" in caplog.text
    assert "waiting to see whether it continues" in caplog.text


def test_another_machine_whose_processes_say_that_the_holder_has_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended_holder(tmp_path) is None
    path, child = lock_of_another_machine(tmp_path), subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"process": child.pid, "started": "never"}))
    assert ended_holder(tmp_path) is None, "only those on its machine know"
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        dead = ended_holder(tmp_path)
    assert dead == "theirs"
    lock, begin = RunLock(tmp_path), time.monotonic()
    lock.known_dead = {dead}
    lock.acquire()
    assert time.monotonic() - begin < 20
    assert lock.is_held
    assert ended_holder(tmp_path) is None, "this process lives"
    lock.release()


def test_another_machine_that_gives_a_sign_of_life_is_left_alone(tmp_path: Path) -> None:
    path = lock_of_another_machine(tmp_path)
    timer = threading.Timer(0.7, lambda: path.write_text(path.read_text().replace('"beat": "2', '"beat": "3')))
    timer.start()
    with pytest.raises(FolderInUseError, match=r"is in use: .* on elsewhere \(process \d+\), since 20.* trains there"):
        RunLock(tmp_path).acquire()
    timer.join()
    assert json.loads(path.read_text())["token"] == "theirs"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 3}', "\0" * 100])
def test_a_lock_that_is_damaged_is_judged_by_its_age(quick: None, tmp_path: Path, content: str) -> None:
    path = tmp_path / NAME
    path.write_text(content)
    os.utime(path, (0, 0))
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert not path.exists()


def test_a_number_that_another_process_has_now_is_none_of_the_holder(tmp_path: Path) -> None:
    path = lock_of_another_machine(tmp_path, host=socket.gethostname())
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"process": os.getppid(), "started": "1"}))
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_holder_that_stood_still_too_long_notices_that_it_lost_the_folder(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    (tmp_path / NAME).unlink()
    lock_of_another_machine(tmp_path)
    with pytest.raises(FolderInUseError, match=r"was taken over by .* on elsewhere"):
        lock.confirm()
    lock.release()
    assert json.loads((tmp_path / NAME).read_text())["token"] == "theirs"


def test_a_lock_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    (tmp_path / NAME).unlink()
    lock.confirm()
    assert (tmp_path / NAME).exists()
    lock.release()
    assert not (tmp_path / NAME).exists()


def test_of_many_that_find_a_dead_lock_one_takes_it(quick: None, tmp_path: Path) -> None:
    lock_of_another_machine(tmp_path, age=1e6)
    locks, refused = [RunLock(tmp_path) for _ in range(8)], []

    def take(lock: RunLock) -> None:
        try:
            lock.acquire()
        except FolderInUseError:
            refused.append(lock)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    for lock in locks:
        lock.release()
    assert not (tmp_path / NAME).exists()


@pytest.mark.slow
def test_clocks_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder whose file times lag behind lives; one whose times lie ahead may be dead."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.6)
    path = lock_of_another_machine(tmp_path, age=500)

    def beat() -> None:
        os.utime(path, (time.time() - 499, time.time() - 499))

    timer = threading.Timer(0.8, beat)
    timer.start()
    with pytest.raises(FolderInUseError, match="elsewhere"):
        RunLock(tmp_path).acquire()
    timer.join()
    monkeypatch.setattr(run_lock, "DEAD_AFTER", 1.0)
    os.utime(path, (time.time() + 3600, time.time() + 3600))
    begin = time.monotonic()
    lock = RunLock(tmp_path)
    lock.acquire()
    assert time.monotonic() - begin < 10
    lock.release()


def test_a_lock_is_never_there_without_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def write(descriptor: int, content: bytes, real: Any = os.write) -> int:
        found.append((tmp_path / NAME).exists())
        return int(real(descriptor, content))

    monkeypatch.setattr(os, "write", write)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert found == [False]
    lock.release()


def test_what_a_killed_start_left_beside_the_lock_goes(tmp_path: Path) -> None:
    old, new = tmp_path / f"{NAME}-1", tmp_path / f"{NAME}-2"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert [*tmp_path.iterdir()] == [new]


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/nowhere/x"), lambda path: path.symlink_to(__file__), Path.mkdir, make_pipe]
)
def test_what_is_no_lock_is_neither_waited_for_nor_written_to(tmp_path: Path, make: Any) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    (tmp_path / NAME).unlink()
    make(tmp_path / NAME)
    own = Path(__file__).read_bytes()
    with pytest.raises(OSError, match=r"no plain file|symbolic links|a directory"):
        lock.confirm()
    lock.release()
    with pytest.raises(
        FolderInUseError, match=r"its \.lock cannot be read \(.*\); remove it if no training runs there"
    ):
        make_trainer(tmp_path).train()
    assert Path(__file__).read_bytes() == own


def test_signs_of_life_that_fail_are_reported_once(
    quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    deadline = time.monotonic() + 20
    while lock._failed < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    lock.release()
    assert caplog.text.count("other machines take this training for dead") == 1


def test_a_fork_sees_that_its_parent_trains(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    child = os.fork()
    if child == 0:
        os._exit(0 if holder_of(tmp_path) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert holder_of(tmp_path) is None
    lock.release()


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_that_lost_its_folder_while_it_saved_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    def lose(*arguments: Any, real: Any = commit._seal) -> None:
        real(*arguments)
        (tmp_path / NAME).unlink()
        lock_of_another_machine(tmp_path)

    monkeypatch.setattr(commit, "_seal", lose)
    with pytest.raises(FolderInUseError, match="was taken over by"):
        make_trainer(tmp_path, eval_strategy="no", async_save=async_save).train()
    assert not list(tmp_path.glob("*checkpoint-*"))


class Nested(Callback):
    """Trains another Trainer in the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.error = folder, ""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2:
            try:
                make_trainer(self.folder, max_steps=2).train()
            except FolderInUseError as error:
                self.error = str(error)


def test_trainers_one_after_the_other_share_a_folder_and_at_once_they_do_not(tmp_path: Path) -> None:
    nested = Nested(tmp_path)
    trainer = make_trainer(tmp_path, nested, max_steps=4)
    trainer.train()
    assert "that is this process" in nested.error
    trainer.train()
    make_trainer(tmp_path, max_steps=5).train(resume_from_checkpoint=True)
    assert not (tmp_path / NAME).exists()


def test_a_training_that_breaks_off_gives_the_folder_back(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_step_end(self, run: Run) -> None:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path, Breaks()).train()
    assert not (tmp_path / NAME).exists()


def test_a_folder_stays_where_a_training_has_run(tmp_path: Path) -> None:
    """A run without files leaves the folder for what the user writes there next."""
    changes = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
    make_trainer(tmp_path / "a" / "run", **changes).train()
    assert (tmp_path / "a" / "run").is_dir()
    with pytest.raises(ValueError, match="does not exist"):
        make_trainer(tmp_path / "b" / "run", **changes).train(resume_from_checkpoint=tmp_path / "nothing")
    assert not (tmp_path / "b").exists()


def test_a_run_that_lost_its_folder_writes_no_more_into_it(tmp_path: Path) -> None:
    class Loses(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 2:
                (tmp_path / NAME).unlink()
                lock_of_another_machine(tmp_path)

    with pytest.raises(FolderInUseError, match="was taken over by"):
        make_trainer(tmp_path, Loses(), eval_strategy="no").train()
    events = [record["event"] for record in read_log(tmp_path / "log.jsonl")]
    assert "exception" not in events
    assert not list(tmp_path.glob("crash-*"))
    assert not list(tmp_path.glob("checkpoint-*"))


def test_an_evaluation_is_not_written_into_a_log_of_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock_of_another_machine(tmp_path)
    metrics: dict[str, Any] = make_trainer(tmp_path).evaluate()
    assert "eval_loss" in metrics
    assert not (tmp_path / "log.jsonl").exists()
    assert "elsewhere" in caplog.text


def test_a_fork_of_the_holder_gives_nothing_back(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release()
        lock.confirm()
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()
    lock.release()
    assert not (tmp_path / NAME).exists()


def test_one_that_replaced_itself_takes_its_own_lock_again(tmp_path: Path) -> None:
    """exec keeps a process's number and its beginning."""
    script = (
        "import os, sys; from pathlib import Path; from trainer_kit.utils.run_lock import RunLock\n"
        "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True)\n"
        "if len(sys.argv) < 3: os.execv(sys.executable, [sys.executable, '-c', os.environ['SCRIPT'], sys.argv[1], 'x'])"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=os.environ | {"SCRIPT": script}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert out.stdout == "held\nheld\n", out.stderr


def test_a_lock_is_renewed_for_a_later_membership(tmp_path: Path) -> None:
    """A later membership may take the lock over from the earlier one, but not the earlier one from the later."""
    lock = RunLock(tmp_path, membership=MembershipPlace("run", 9))
    lock.renew(MembershipPlace("run", 9))
    lock.renew(MembershipPlace("run", 10, 9))
    assert json.loads((tmp_path / NAME).read_text())["membership"] == ["run", 10]
    with pytest.raises(CutOffError, match="belongs to membership 10 of this run"):
        RunLock(tmp_path).renew(MembershipPlace("run", 10, 9))
    lock.confirm()
    lock.renew(None)
    assert json.loads((tmp_path / NAME).read_text())["membership"] is None, "a shorter content"
    lock.release()
    assert not (tmp_path / NAME).exists()

"""One process at a time saves numbered checkpoints to a project's folder."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.ranks import on_ranks
from torch import nn

from trainer_kit.accelerator import Accelerator
from trainer_kit.accelerator.project_lock import NAME, lock_project
from trainer_kit.errors import FolderInUseError
from trainer_kit.utils.run_lock import RunLock

LOOP = """
import sys
from torch import nn
from trainer_kit.accelerator import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
accelerator.prepare(nn.Linear(1, 1))
accelerator.save_state()
print("saved", flush=True)
for line in sys.stdin:
    accelerator.end_training()
    print("ended", flush=True)
"""


def loop(folder: Path) -> Accelerator:
    accelerator = Accelerator(cpu=True, project_dir=folder)
    accelerator.prepare(nn.Linear(1, 1))
    return accelerator


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has saved to the folder; each line that it reads lets it call `end_training`."""
    command = [sys.executable, "-c", LOOP, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "saved\n"
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.scenario
def test_another_process_is_refused_until_the_training_ends(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(
            FolderInUseError, match=rf"project_dir='.*' is in use: .*process {process.pid}\), since .* trains there"
        ):
            loop(tmp_path).save_state()
        loop(tmp_path).save_state(tmp_path / "checkpoints" / "own")  # numbers and prunes nothing
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ended\n"
        accelerator = loop(tmp_path)
        accelerator.save_state()
        assert names(tmp_path) == ["checkpoint_0", "checkpoint_1", "own"]
        accelerator.end_training()


@pytest.mark.scenario
def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / NAME).exists()
        loop(tmp_path).save_state()
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1"]


@pytest.mark.scenario
def test_a_process_that_ends_leaves_no_lock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LOOP, tmp_path], stdin=subprocess.DEVNULL, timeout=120, check=True)
    assert not (tmp_path / NAME).exists()
    assert names(tmp_path) == ["checkpoint_0"]


def test_accelerators_of_one_process_share_the_lock(tmp_path: Path) -> None:
    first, second = loop(tmp_path), loop(tmp_path)
    first.save_state()
    second.save_state()
    first.end_training()
    assert (tmp_path / NAME).exists()
    first.save_state()
    del first
    gc.collect()
    second.save_state()
    assert (tmp_path / NAME).exists()
    del second
    gc.collect()
    assert not (tmp_path / NAME).exists()
    assert len(names(tmp_path)) == 4


def test_a_trainer_may_have_the_same_folder(tmp_path: Path) -> None:
    accelerator = loop(tmp_path)
    accelerator.save_state()
    lock = RunLock(tmp_path)
    lock.acquire()
    accelerator.save_state()
    lock.release()
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1"]


def test_a_loop_that_saves_elsewhere_takes_no_lock(tmp_path: Path) -> None:
    loop(tmp_path).save_state(tmp_path / "state")
    assert not (tmp_path / NAME).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_rank", [True, False])
def test_a_forked_process_shares_the_lock_of_its_parent_only_as_a_rank(tmp_path: Path, is_rank: bool) -> None:
    user = loop(tmp_path)
    lock = lock_project(tmp_path, user)
    if (child := os.fork()) == 0:
        if is_rank:
            os.environ["WORLD_SIZE"] = "1"
        try:
            os._exit(0 if lock_project(tmp_path, user) is lock else 1)
        except FolderInUseError:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if is_rank else 2)
    lock.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_outlives_the_lock_of_its_parent(tmp_path: Path) -> None:
    user = loop(tmp_path)
    lock = lock_project(tmp_path, user)
    ready, go = os.pipe()
    if (child := os.fork()) == 0:
        os.environ["WORLD_SIZE"] = "1"
        os.read(ready, 1)
        own = lock_project(tmp_path, user)
        os._exit(0 if own is not lock and own.is_held else 1)
    lock.release()
    os.write(go, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_system_that_does_not_answer_ends_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = loop(tmp_path)
    lock = lock_project(tmp_path, user)

    def stale(self: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", stale)
        lock._beat()
    assert lock.is_held
    lock.release()


def test_a_folder_that_was_removed_stays_away() -> None:
    folder, user = Path(tempfile.mkdtemp()), Accelerator(cpu=True)
    lock = lock_project(folder, user)
    shutil.rmtree(folder)
    lock._beat()
    assert not folder.exists()
    assert not lock.is_held
    first = lock_project(folder, user)
    shutil.rmtree(folder)
    second = lock_project(folder, user)
    assert (first.is_held, second.is_held) == (False, True)
    second.release()
    shutil.rmtree(folder)


def test_nothing_is_committed_to_a_folder_that_was_taken_over(tmp_path: Path) -> None:
    accelerator = loop(tmp_path)
    accelerator.save_state()
    (tmp_path / NAME).unlink()
    other = RunLock(tmp_path, name=NAME)
    other.acquire()
    with pytest.raises(FolderInUseError, match="was taken over by"):
        accelerator.save_state()
    other.release()
    assert names(tmp_path) == ["checkpoint_0"]


def save(folder: str) -> str:
    accelerator = loop(Path(folder))
    try:
        return Path(accelerator.save_state()).name
    except FolderInUseError as error:
        return str(error)


@pytest.mark.distributed
def test_all_ranks_are_refused(tmp_path: Path) -> None:
    user = loop(tmp_path)
    lock = lock_project(tmp_path, user)
    first, second = on_ranks(2, save, str(tmp_path))
    assert first == second
    assert f"process {os.getpid()}" in first
    lock.release()
    assert on_ranks(2, save, str(tmp_path)) == ["checkpoint_0"] * 2

"""A save that fails, is killed or loses its power at any of its steps: there is a checkpoint to go on from."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit.checkpoint import (
    newest_valid,
    read_arguments,
    read_state,
    remove_stale_staging,
    take_snapshot,
    verify,
    write_checkpoint,
)
from trainer_kit.checkpoint.format.loading import load_weights

STEPS = ("mkdir", "open", "write", "fsync", "replace", "rename", "unlink", "rmdir")
OLD = 5
DEAD = 2**22 + 1  # larger than any process's number


def save(output_dir: Path, step: int, value: float, size: int = 8) -> Path:
    weights = {"a": torch.full((size,), value), "b": torch.full((size,), value)}
    states = {"optimizer": {"exp_avg": torch.full((3,), value)}, "trainer": {"value": value}}
    files = {"tokenizer/vocabulary.txt": b"a b c"}
    snapshot = take_snapshot(step, weights, states, arguments={"value": value}, files=files)
    return write_checkpoint(output_dir, snapshot, max_shard_size=4 * size)


def value_of(checkpoint: Path) -> float:
    """What `save` was called with, after a look at every part."""
    verify(checkpoint)
    model = torch.nn.ParameterDict({"a": torch.zeros(8), "b": torch.zeros(8)})
    load_weights(model, checkpoint, is_verified=True)
    value = model["a"][0].item()
    assert all((parameter == value).all() for parameter in model.values())
    trainer, optimizer = read_state(checkpoint, "trainer"), read_state(checkpoint, "optimizer")
    assert trainer == read_arguments(checkpoint) == {"value": value}
    assert optimizer is not None
    assert (optimizer["exp_avg"] == value).all()
    return value


class Disk:
    """Stands in the place of the system's calls that change a disk, and counts them.

    Attributes:
        done: The calls so far, by name.
        before: Called with the number and the name of each before it happens; may fail.
        at_write: Gives the bytes to write instead, of the number and the bytes.
        flushed: Numbers of the files whose content has been flushed since it was last written.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.before: Callable[[int, str], None] = lambda number, name: None
        self.at_write: Callable[[int, Any], Any] = lambda number, content: content
        self.flushed: set[int] = set()
        for name in STEPS:
            patch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            makes_none = name == "mkdir" and os.path.exists(args[0])
            if makes_none or (name == "open" and not args[1] & os.O_WRONLY):
                return function(*args, **options)
            number = len(self.done)
            self.done.append(name)
            self.before(number, name)
            if name == "write":
                self.flushed.discard(os.fstat(args[0]).st_ino)
                return function(args[0], self.at_write(number, args[1]))
            if name == "fsync":
                self.flushed.add(os.fstat(args[0]).st_ino)
            return function(*args, **options)

        return call


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def steps_of_a_save(tmp_path: Path, step: int) -> list[str]:
    save(tmp_path / "count", OLD, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        save(tmp_path / "count", step, 2.0)
    return disk.done


def check(output_dir: Path, allowed: set[float]) -> float:
    """The newest checkpoint loads, is one of those allowed, and stays so when the next start has tidied up."""
    values = []
    for _ in range(2):
        found = newest_valid(output_dir, lambda sentence: None)
        assert found is not None
        values.append(value_of(found))
        remove_stale_staging(output_dir)
    assert values[0] == values[1]
    assert values[0] in allowed
    return values[0]


def only_checkpoints(output_dir: Path) -> bool:
    return all(path.name.startswith("checkpoint-") for path in output_dir.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "lasts"),
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EACCES, False)],
    ids=["full once", "full from then on", "an I/O error", "no permission"],
)
@pytest.mark.parametrize("step", [OLD, 7], ids=["replaces", "new"])
def test_an_error_at_any_step(
    tmp_path: Path, step: int, number: int, lasts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps = steps_of_a_save(tmp_path, step)
    assert {"mkdir", "open", "write", "fsync", "replace", "rename"} <= set(steps)
    for fails_at, name in enumerate(steps):
        output_dir = tmp_path / str(fails_at)
        save(output_dir, OLD, 1.0)

        def fail(at: int, name: str, fails_at: int = fails_at) -> None:
            if at == fails_at or (lasts and at > fails_at):
                raise OSError(number, os.strerror(number))

        error = None
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch).before = fail
            try:
                save(output_dir, step, 2.0)
            except OSError as raised:
                error = raised
        if error is None:  # only what is not needed any more could not be removed, which is said
            assert name in ("unlink", "rmdir"), (fails_at, name)
            assert "could not be removed" in caplog.text
            assert check(output_dir, {2.0}) == 2
        else:
            assert error.errno == number
            assert lasts or (output_dir / f"checkpoint-{OLD}").is_dir()  # at once, not by the next start
            check(output_dir, {1.0, 2.0} if name == "fsync" and fails_at > steps.index("rename") else {1.0})
        if not lasts and error is not None:
            assert only_checkpoints(output_dir), (fails_at, name)
        save(output_dir, step, 3.0)  # the next one tries again
        assert check(output_dir, {3.0}) == 3
        assert only_checkpoints(output_dir), (fails_at, name)


def test_a_short_write_at_any_step_is_gone_on_with(tmp_path: Path) -> None:
    steps = steps_of_a_save(tmp_path, 7)
    for cut_at in (at for at, name in enumerate(steps) if name == "write"):
        output_dir = tmp_path / str(cut_at)
        save(output_dir, OLD, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch)
            disk.at_write = lambda at, content, cut_at=cut_at: content[: len(content) // 2 if at == cut_at else None]
            path = save(output_dir, 7, 2.0)
        assert len(disk.done) == len(steps) + 1
        assert value_of(path) == 2


class States:
    """The folder as each step of a save finds it, and as it is in the middle of each write: what a kill leaves.

    Attributes:
        killed: What is there after a kill, step by step.
        cut_off: What the disk holds if the power goes at that moment too: nothing of what was not flushed.
    """

    def __init__(self, output_dir: Path, folder: Path, disk: Disk) -> None:
        self.output_dir, self.folder, self.disk = output_dir, folder, disk
        self.killed: list[Path] = []
        self.cut_off: list[Path] = []
        disk.before = lambda number, name: self.keep()
        disk.at_write = self.halfway

    def halfway(self, number: int, content: Any) -> Any:
        return content[: max(1, len(content) // 2)]  # the rest follows, in calls of its own

    def keep(self) -> None:
        before, self.disk.before = self.disk.before, lambda number, name: None
        try:
            self.killed.append(self.copy(f"killed-{len(self.killed)}", lambda path: False))
            self.cut_off.append(self.copy(f"cut-off-{len(self.cut_off)}", self.is_lost))
        finally:
            self.disk.before = before

    def is_lost(self, path: Path) -> bool:
        return path.stat().st_ino not in self.disk.flushed

    def copy(self, name: str, is_lost: Callable[[Path], bool]) -> Path:
        copy = self.folder / name
        for path in sorted(self.output_dir.rglob("*")):
            target = copy / path.relative_to(self.output_dir).as_posix().replace(f"-{os.getpid()}", f"-{DEAD}")
            if path.is_dir():
                target.mkdir(parents=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(b"" if is_lost(path) else path.read_bytes())
        return copy


@pytest.mark.slow
@pytest.mark.parametrize("step", [OLD, 7], ids=["replaces", "new"])
def test_a_kill_or_a_power_cut_at_any_step(tmp_path: Path, step: int) -> None:
    output_dir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        save(output_dir, OLD, 1.0)
        count = len(disk.done)
        states = States(output_dir, tmp_path, disk)
        save(output_dir, step, 2.0)
        states.keep()
    assert len(states.killed) > count
    for kept in (states.killed, states.cut_off):
        seen = [check(each, {1.0, 2.0}) for each in kept]
        assert seen == sorted(seen)  # once it is there, it stays
        assert (seen[0], seen[-1]) == (1, 2)
        assert all(only_checkpoints(each) for each in kept)


FULL = """
import os, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_faults import save, value_of, only_checkpoints
from trainer_kit.checkpoint import newest_valid
folder, errors, committed = Path(sys.argv[2]), 0, 0
run, filler = folder / "run", folder / "filler"
save(run, 1, 1.0)
for step, left in enumerate(range(0, 64 * 1024, 4096), start=2):
    with open(filler, "wb") as file:
        file.truncate(0)
        os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - left))
    before = newest_valid(run, sys.exit)
    try:
        found = save(run, step, float(step))
    except OSError as error:
        assert error.errno == 28 and str(run) in str(error), error
        errors += 1
        found = before
        assert newest_valid(run, sys.exit) == before
    else:
        committed += 1
        shutil.rmtree(before)
    assert value_of(newest_valid(run, sys.exit)) == int(found.name.split("-")[1])
    assert only_checkpoints(run), os.listdir(run)
filler.unlink()
save(run, 1000, 1000.0)
assert value_of(newest_valid(run, sys.exit)) == 1000
print(errors, committed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a file system in memory")
@pytest.mark.parametrize("limit", ["size=2m", "size=8m,nr_inodes=30"])
def test_a_disk_that_is_really_full(tmp_path: Path, limit: str) -> None:
    mount = f'mount -t tmpfs -o {limit} none "$0" || exit 77; exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False, timeout=60).returncode:
        pytest.skip("file systems cannot be mounted here")
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [*inside, sys.executable, "-c", FULL, tests, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    errors, committed = map(int, done.stdout.split())
    assert errors > 0
    assert committed > 0

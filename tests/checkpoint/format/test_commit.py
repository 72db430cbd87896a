from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit.checkpoint import (
    find_checkpoints,
    load_checkpoint_in_model,
    load_tensors,
    newest_valid,
    read_arguments,
    read_state,
    take_snapshot,
    verify,
    write_checkpoint,
)

STEPS = ("mkdir", "open", "write", "fsync", "rename", "replace")
STATES = {"optimizer": {"step": 3, "exp_avg": [torch.ones(3), np.ones(2)]}, "trainer": {"step": 3, "best": math.inf}}


def save(output_dir: Path, step: int, value: float = 0.0, **options: Any) -> Path:
    writing = {key: options.pop(key) for key in ("max_shard_size", "name", "to_host") if key in options}
    options = {"arguments": {"learning_rate": 0.1}, **options}
    snapshot = take_snapshot(step, {"weight": torch.full((4, 2), value)}, STATES, **options)
    return write_checkpoint(output_dir, snapshot, **writing)


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_a_checkpoint_has_the_documented_files(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "tokenizer/vocabulary.txt": b"a"}
    path = save(tmp_path / "runs" / "demo", 500, world_size=4, files=files)
    assert path == tmp_path / "runs" / "demo" / "checkpoint-500"
    expected = ["arguments.json", "config.json", "manifest.json", "model.safetensors", "state/optimizer.json"]
    expected += ["state/optimizer.safetensors", "state/trainer.json", "tokenizer/vocabulary.txt"]
    assert names(path) == expected
    manifest = verify(path)
    assert sorted([*manifest.files, "manifest.json"]) == expected
    assert (manifest.step, manifest.world_size) == (500, 4)
    assert {name: (path / name).read_bytes() for name in files} == files
    assert os.listdir(path.parent) == ["checkpoint-500"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    arguments = {"betas": (0.9, 0.95), "output_dir": tmp_path, "limit": math.inf, "names": ["a"]}
    path = save(tmp_path, 1, 2.0, arguments=arguments)
    assert read_arguments(path) == arguments
    optimizer = read_state(path, "optimizer")
    assert optimizer is not None
    assert torch.equal(optimizer["exp_avg"][0], torch.ones(3))
    assert isinstance(optimizer["exp_avg"][1], np.ndarray)
    assert read_state(path, "trainer") == {"step": 3, "best": math.inf}
    assert read_state(path, "ema") is None
    assert load_tensors(path)["weight"].tolist() == [[2.0, 2.0]] * 4


def test_the_states_are_sharded_too(tmp_path: Path) -> None:
    path = save(tmp_path, 1, max_shard_size=12)
    assert "state/optimizer-00001-of-00003.safetensors" not in names(path)
    assert "state/optimizer-00001-of-00002.safetensors" in names(path)
    assert verify(path).step == 1
    assert read_state(path, "optimizer")["exp_avg"][0].tolist() == [1, 1, 1]  # type: ignore[index]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, 1.0, files={"old.txt": b""})
    path = save(tmp_path, 5, 2.0)
    assert os.listdir(tmp_path) == ["checkpoint-5"]
    assert not (path / "old.txt").exists()
    assert load_tensors(path)["weight"][0, 0] == 2


def test_what_a_dead_process_of_the_same_number_left_is_in_nobodys_way(tmp_path: Path) -> None:
    leftover = tmp_path / f".staging-checkpoint-5-{os.getpid()}"
    leftover.mkdir()
    (leftover / "junk.txt").touch()
    replaced = tmp_path / ".replaced-checkpoint-5"
    save(tmp_path, 5).rename(replaced)
    save(tmp_path, 5)
    assert "junk.txt" not in names(save(tmp_path, 5))
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def interrupted(tensor: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_shard_size": "many"}, ValueError, "max_shard_size='many'"),
        ({"files": {"../evil": b""}}, ValueError, "'../evil', which does not lie inside"),
        ({"to_host": interrupted}, KeyboardInterrupt, None),
    ],
)
def test_an_error_leaves_the_older_checkpoint_and_nothing_else(
    tmp_path: Path, options: dict[str, Any], error: type[BaseException], message: str | None
) -> None:
    save(tmp_path, 1)
    for step in (1, 2):
        with pytest.raises(error, match=message):
            save(tmp_path, step, 9.0, **options)
        assert os.listdir(tmp_path) == ["checkpoint-1"]
        assert load_tensors(newest_valid(tmp_path, pytest.fail) or tmp_path)["weight"][0, 0] == 0


class Disk:
    """Counts the steps that reach the disk, and from one of them on fails as a full disk does.

    Attributes:
        left: Steps that still succeed.
        done: Names of the steps so far.
    """

    def __init__(self, patch: pytest.MonkeyPatch, left: float = math.inf, recovers: bool = False) -> None:
        self.left = left
        self.recovers = recovers
        self.done: list[str] = []
        for name in STEPS:
            patch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            makes_none = name == "mkdir" and os.path.exists(args[0])
            reads = name == "open" and not args[1] & os.O_WRONLY
            if not (makes_none or reads):
                self.step(name, None if name in ("write", "fsync") else str(args[0]))
            return function(*args, **kwargs)

        return call

    def step(self, name: str, path: str | None) -> None:
        self.done.append(name)
        if self.left <= 0:
            if self.recovers:
                self.left = math.inf
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)  # as the system's own errors
        self.left -= 1


def steps_of_a_save(output_dir: Path, step: int) -> list[str]:
    output_dir.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        save(output_dir, step, max_shard_size=16)
        return disk.done


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: Any) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(path.relative_to(tmp_path).as_posix().replace(str(os.getpid()), "PID"))
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the names of open files are read from /proc")
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    path = save(tmp_path, 1, files={"deep/down/config.json": b"{}"})
    assert events[-2:] == ["rename", "."]
    staging = Path(".staging-checkpoint-1-PID")
    files = [(staging / name).with_name(f".{Path(name).name}.tmp").as_posix() for name in names(path)]
    assert set(files) < set(events)
    manifest = events.index(f"{staging}/.manifest.json.tmp")
    assert max(map(events.index, files)) == manifest
    folders = {staging, staging / "state", staging / "deep", staging / "deep" / "down"}
    assert {folder.as_posix() for folder in folders} == set(events[manifest + 1 : -2])


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("step", [5, 7])
def test_a_disk_that_fills_up_at_any_step_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: Any, step: int, recovers: bool
) -> None:
    steps = steps_of_a_save(tmp_path / "count", 1)
    assert set(steps) == set(STEPS)
    for fails_at in range(len(steps) + (step == 5)):  # replacing a checkpoint takes one rename more
        output_dir = tmp_path / str(fails_at)
        save(output_dir, 5, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, left=fails_at, recovers=recovers)
            with pytest.raises(OSError, match="No space left on device") as caught:
                save(output_dir, step, 2.0, max_shard_size=16)
        assert caught.value.errno == errno.ENOSPC
        assert str(output_dir) in str(caught.value)
        if recovers:
            assert (output_dir / "checkpoint-5").exists()
        found = newest_valid(output_dir, pytest.fail)
        assert found is not None
        assert not list(output_dir.glob(".staging-*"))
        assert set(find_checkpoints(output_dir)) <= {output_dir / "checkpoint-5", output_dir / "checkpoint-7"}
        model = torch.nn.Linear(2, 4, bias=False)
        load_checkpoint_in_model(model, found)
        assert model.weight[0, 0].item() in ((1, 2) if fails_at >= len(steps) - 1 else (1,))


def test_a_new_folder_is_flushed_in_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[int] = set()
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (flushed.add(os.fstat(descriptor).st_ino), fsync(descriptor))[1]
    )
    write_checkpoint(tmp_path / "a" / "b", take_snapshot(1, {"w": torch.ones(1)}, {}, arguments={}))
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")} <= flushed


def test_what_somebody_else_commits_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def other_is_faster(source: Any, target: Any) -> None:
        if Path(source).name.startswith(".staging"):
            monkeypatch.setattr(os, "rename", rename)
            write_checkpoint(tmp_path, take_snapshot(1, {"w": torch.zeros(1)}, {}, arguments={}, world_size=9))
        rename(source, target)

    monkeypatch.setattr(os, "getpid", iter(range(1000, 2000)).__next__)
    monkeypatch.setattr(os, "rename", other_is_faster)
    with pytest.raises(OSError, match="not empty"):
        write_checkpoint(tmp_path, take_snapshot(1, {"w": torch.ones(1)}, {}, arguments={}))
    assert verify(tmp_path / "checkpoint-1").world_size == 9


@pytest.mark.parametrize("name", ["manifest.json", "arguments.json", "state/x.json", "model.safetensors"])
def test_a_processors_files_cannot_take_a_checkpoints_names(name: str) -> None:
    with pytest.raises(ValueError, match="which is a checkpoint's own"):
        take_snapshot(1, {"w": torch.ones(1)}, {}, arguments={}, files={name: b"{}"})

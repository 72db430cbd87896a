from __future__ import annotations

import builtins
import errno
import math
import os
import sys
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
    verify,
    write_checkpoint,
)

STATES = {"optimizer": {"step": 3, "exp_avg": [torch.ones(3), np.ones(2)]}, "trainer": {"step": 3, "best": math.inf}}


def save(output_dir: Path, step: int, value: float = 0.0, **options: Any) -> Path:
    options = {"arguments": {"learning_rate": 0.1}, **options}
    return write_checkpoint(output_dir, step, {"weight": torch.full((4, 2), value)}, STATES, **options)


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_a_checkpoint_has_the_documented_files(tmp_path: Path) -> None:
    def extra(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "vocabulary.txt").write_text("a")

    path = save(tmp_path / "runs" / "demo", 500, world_size=4, extra=extra)
    assert path == tmp_path / "runs" / "demo" / "checkpoint-500"
    expected = ["arguments.json", "config.json", "manifest.json", "model.safetensors", "state/optimizer.json"]
    expected += ["state/optimizer.safetensors", "state/trainer.json", "tokenizer/vocabulary.txt"]
    assert names(path) == expected
    manifest = verify(path)
    assert sorted([*manifest.files, "manifest.json"]) == expected
    assert (manifest.step, manifest.world_size) == (500, 4)
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
    save(tmp_path, 5, 1.0, extra=lambda directory: (directory / "old.txt").touch())
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


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../evil", "a/b", ".hidden", "a b", "ä", "x.safetensors", "optimizer-00001-of-00002"]
)
def test_names_of_states_that_cannot_be_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a file's name"):
        write_checkpoint(tmp_path, 1, {}, {name: {}}, arguments={})
    assert os.listdir(tmp_path) == []


def test_names_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'EMA' and 'ema' differ only in case"):
        write_checkpoint(tmp_path, 1, {}, {"EMA": {}, "ema": {}}, arguments={})


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step=-1"):
        save(tmp_path, -1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arguments": {"f": print}}, TypeError, r"state\['f'\] is of type"),
        ({"arguments": {"f": [torch.ones(1)]}}, TypeError, r"arguments hold a tensor or an array \(f\.0\)"),
        ({"max_shard_size": "many"}, ValueError, "max_shard_size='many'"),
        ({"extra": lambda directory: (directory / "link").symlink_to("/etc")}, ValueError, "link is neither"),
        ({"extra": lambda directory: 1 / 0}, ZeroDivisionError, "zero"),
    ],
)
def test_an_error_leaves_the_older_checkpoint_and_nothing_else(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    save(tmp_path, 1)
    for step in (1, 2):
        with pytest.raises(error, match=message):
            save(tmp_path, step, 9.0, **options)
        assert os.listdir(tmp_path) == ["checkpoint-1"]
        assert load_tensors(newest_valid(tmp_path, pytest.fail) or tmp_path)["weight"][0, 0] == 0


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"the state 'mine' cannot be saved: state\['a'\]\[0\] is of type"):
        write_checkpoint(tmp_path, 1, {}, {"mine": {"a": [print]}}, arguments={})
    with pytest.raises(TypeError, match="the state 'mine' cannot be saved: tensor 'a' is sparse"):
        write_checkpoint(tmp_path, 1, {}, {"mine": {"a": torch.eye(2).to_sparse()}}, arguments={})
    assert os.listdir(tmp_path) == []


def test_ctrl_c_in_the_middle_leaves_no_staging(tmp_path: Path) -> None:
    def extra(directory: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, extra=extra)
    assert os.listdir(tmp_path) == []


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
        for name in ("fsync", "rename", "replace", "mkdir"):
            patch.setattr(os, name, self.counted(name, getattr(os, name)))
        opened = builtins.open

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            handle = opened(file, mode, *args, **kwargs)
            return Handle(handle, self) if mode == "wb" else handle

        patch.setattr(builtins, "open", open_)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "mkdir" or not os.path.exists(args[0]):
                self.step(name)
            return function(*args, **kwargs)

        return call

    def step(self, name: str) -> None:
        self.done.append(name)
        if self.left <= 0:
            if self.recovers:
                self.left = math.inf
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1


class Handle:
    """A file whose writes count."""

    def __init__(self, handle: Any, disk: Disk) -> None:
        self.handle, self.disk = handle, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle.close()

    def write(self, content: Any) -> int:
        self.disk.step("write")
        return int(self.handle.write(content))


def steps_of_a_save(output_dir: Path, step: int) -> list[str]:
    output_dir.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        save(output_dir, step, max_shard_size=16)
        return disk.done


def test_everything_is_flushed_before_the_manifest_and_the_rename(tmp_path: Path, monkeypatch: Any) -> None:
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
    path = save(tmp_path, 1, extra=lambda directory: (directory / "config.json").write_text("{}") and None)
    staging = ".staging-checkpoint-1-PID"
    assert events[-4:] == [f"{staging}/manifest.json", staging, "rename", "."]
    before = set(events[:-4])
    assert before >= {staging, f"{staging}/state"}
    assert before >= {f"{staging}/{name}" for name in names(path) if name != "manifest.json"}


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("step", [5, 7])
def test_a_disk_that_fills_up_at_any_step_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: Any, step: int, recovers: bool
) -> None:
    steps = steps_of_a_save(tmp_path / "count", 1)
    folders = {"mkdir"} if sys.version_info >= (3, 11) else set()  # pathlib of 3.10 holds its own os.mkdir
    assert {"write", "fsync", "rename", "replace"} | folders == set(steps)
    for fails_at in range(len(steps) + (step == 5)):  # replacing a checkpoint takes one rename more
        output_dir = tmp_path / str(fails_at)
        save(output_dir, 5, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, left=fails_at, recovers=recovers)
            with pytest.raises(OSError, match="No space left on device") as caught:
                save(output_dir, step, 2.0, max_shard_size=16)
        assert caught.value.errno == errno.ENOSPC
        if recovers:
            assert (output_dir / "checkpoint-5").exists()
        found = newest_valid(output_dir, pytest.fail)
        assert found is not None
        assert not list(output_dir.glob(".staging-*"))
        assert set(find_checkpoints(output_dir)) <= {output_dir / "checkpoint-5", output_dir / "checkpoint-7"}
        model = torch.nn.Linear(2, 4, bias=False)
        load_checkpoint_in_model(model, found)
        assert model.weight[0, 0].item() in ((1, 2) if fails_at >= len(steps) - 1 else (1,))

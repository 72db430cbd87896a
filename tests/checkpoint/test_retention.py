from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from trainer_kit.checkpoint import prune


def make(directory: Path, *steps: int) -> list[Path]:
    paths = [directory / f"checkpoint-{step}" for step in steps]
    for path in paths:
        path.mkdir()
        (path / "manifest.json").touch()
    return paths


@pytest.mark.parametrize(
    ("keep", "protected", "remaining"),
    [
        (None, [], [1, 2, 3, 4]),
        (9, [], [1, 2, 3, 4]),
        (4, [], [1, 2, 3, 4]),
        (3, [], [2, 3, 4]),
        (1, [], [4]),
        (2, [1], [1, 4]),
        (3, [2], [2, 3, 4]),
        (1, [2], [2, 4]),
        (1, [1, 2, 3], [1, 2, 3, 4]),
        (1, [4], [4]),
        (2, [9], [3, 4]),
    ],
)
def test_the_oldest_go_and_the_newest_and_protected_stay(
    tmp_path: Path, keep: int | None, protected: list[int], remaining: list[int]
) -> None:
    committed = make(tmp_path, 1, 2, 3, 4)
    left = prune(committed, keep, {tmp_path / f"checkpoint-{step}" for step in protected})
    assert left == [tmp_path / f"checkpoint-{step}" for step in remaining]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in left]


def test_what_this_run_did_not_commit_stays(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    assert prune(make(tmp_path, 3, 4), 1, ()) == [tmp_path / "checkpoint-4"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    assert prune([], 1, ()) == []


def test_one_that_somebody_deleted_is_left_out(tmp_path: Path) -> None:
    committed = make(tmp_path, 1, 2)
    (committed[0] / "manifest.json").unlink()
    committed[0].rmdir()
    assert prune(committed, 1, ()) == committed[1:]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep={keep} would delete every checkpoint"):
        prune(make(tmp_path, 1), keep, ())


def test_a_checkpoint_is_hidden_before_its_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = make(tmp_path, 1, 2)
    seen: list[list[str]] = []

    def killed(path: Path) -> None:
        seen.append(sorted(os.listdir(tmp_path)))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(committed, 1, ())
    assert seen == [[f".staging-delete-checkpoint-1-{os.getpid()}", "checkpoint-2"]]


@pytest.mark.parametrize("function", ["os.rename", "shutil.rmtree"])
def test_a_file_system_that_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    committed = make(tmp_path, 1, 2)
    monkeypatch.setattr(function, refuse)
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        left = prune(committed, 1, ())
    assert left == (committed if function == "os.rename" else committed[1:])
    assert "Permission denied" in caplog.text

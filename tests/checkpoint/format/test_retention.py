from __future__ import annotations

import logging
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.checkpoint import Committed, Retention, prune


def make(directory: Path, *steps: int) -> list[Committed]:
    for step in steps:
        path = directory / f"checkpoint-{step}"
        path.mkdir()
        (path / "manifest.json").touch()
    return [Committed(f"checkpoint-{step}", number) for number, step in enumerate(steps, start=1)]


@pytest.mark.parametrize(
    ("keep", "protected", "remaining"),
    [
        (None, [], [1, 2, 3, 4]),
        (9, [], [1, 2, 3, 4]),
        (4, [], [1, 2, 3, 4]),
        (3, [], [2, 3, 4]),
        (1, [], [4]),
        (2, [1], [1, 3, 4]),
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
    left = prune(tmp_path, committed, Retention(keep), {f"checkpoint-{step}" for step in protected})
    assert [each.name for each in left] == [f"checkpoint-{step}" for step in remaining]
    assert sorted(os.listdir(tmp_path)) == [each.name for each in left]


METRICS = (0.5, None, 0.2, 0.9, math.nan, 0.2, 0.4)


@pytest.mark.parametrize(
    ("retention", "remaining"),
    [
        (Retention(1, 1), [3, 7]),
        (Retention(1, 2), [3, 6, 7]),
        (Retention(2, 3), [3, 6, 7]),
        (Retention(1, 2, greater_is_better=True), [1, 4, 7]),
        (Retention(1, 99), [1, 3, 4, 6, 7]),
        (Retention(1, 1, every=2), [2, 3, 4, 6, 7]),
        (Retention(2, 1, every=5), [3, 5, 6, 7]),
        (Retention(None, 1, every=5), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_best_and_every_so_many_stay(retention: Retention, remaining: list[int]) -> None:
    committed = [Committed(f"checkpoint-{number}", number, metric) for number, metric in enumerate(METRICS, start=1)]
    assert [each.number for each in retention.stays(committed)] == remaining


@given(
    metrics=st.lists(st.none() | st.floats(-1, 1), max_size=12),
    newest=st.integers(1, 4),
    best=st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    greater=st.booleans(),
)
def test_pruning_at_each_commit_leaves_what_pruning_at_the_end_does(
    metrics: list[float | None], newest: int, best: int, every: int | None, greater: bool
) -> None:
    """What is deleted once would never have come back."""
    retention = Retention(newest, best, every, greater)
    every_one = [Committed(str(number), number, metric) for number, metric in enumerate(metrics, start=1)]
    left: list[Committed] = []
    for each in every_one:
        left = retention.stays([*left, each])
    assert left == retention.stays(every_one)
    assert every_one[-newest:] == left[-newest:]


def test_what_this_run_did_not_commit_stays(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    committed = make(tmp_path, 3, 4)
    assert prune(tmp_path, committed, Retention(1)) == committed[1:]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    assert prune(tmp_path, [], Retention(1)) == []


def test_one_that_somebody_deleted_is_left_out(tmp_path: Path) -> None:
    committed = make(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "checkpoint-1")
    assert prune(tmp_path, committed, Retention(1)) == committed[1:]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep={keep} would delete every checkpoint"):
        Retention(keep)


def test_a_checkpoint_is_hidden_before_its_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = make(tmp_path, 1, 2)
    seen: list[list[str]] = []

    def killed(path: Path) -> None:
        seen.append(sorted(os.listdir(tmp_path)))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, committed, Retention(1))
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
        left = prune(tmp_path, committed, Retention(1))
    assert left == (committed if function == "os.rename" else committed[1:])
    assert "Permission denied" in caplog.text

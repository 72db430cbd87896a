"""The main process is lost, and another one goes on with its folder, or with one on a disk of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scenarios import task

from trainer_kit.checkpoint import Committed
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.takeover import take_over
from trainer_kit.config import environment
from trainer_kit.errors import CutOffError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[CheckpointManager]:
    """Of a process that has not heard of the newest checkpoint."""
    trainer = task.make_trainer(tmp_path / "run", max_steps=8, eval_strategy="no", save_steps=2)
    trainer.train()
    found = CheckpointManager(trainer.run, trainer.events)
    found.find(True)
    assert [each.name for each in found.saver.committed] == [f"checkpoint-{step}" for step in (4, 6, 8)]
    found.saver.committed.pop()
    yield found
    found.release_folder()


def join(monkeypatch: pytest.MonkeyPatch, number: int, after: int) -> None:
    monkeypatch.setenv(environment.MEMBERSHIP, f"run/{number}/{after}/0")


def names(checkpoints: CheckpointManager) -> list[str]:
    return [each.name for each in checkpoints.saver.committed]


def test_it_takes_in_what_the_last_one_has_committed(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch, 2, 1)
    assert take_over(checkpoints)
    assert names(checkpoints) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert (checkpoints.folder / ".membership-2-run").exists()
    assert not list(checkpoints.folder.glob("earlier-*")), "the log stays"
    join(monkeypatch, 3, 2)
    assert not take_over(checkpoints), "it is the main process already"
    assert (checkpoints.folder / ".membership-3-run").exists()
    join(monkeypatch, 3, 2)
    with pytest.raises(CutOffError, match="belongs to membership 3 of this run"):
        take_over(checkpoints)


def test_what_was_saved_again_counts_once(checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 2, 1)
    newest = checkpoints.saver.committed[-1]
    checkpoints.saver.committed.append(newest._replace(name="checkpoint-7", number=newest.number + 5))
    assert take_over(checkpoints)
    assert names(checkpoints) == ["checkpoint-4", "checkpoint-6"], "the folder lacks the newest one"
    assert (checkpoints.folder / "earlier-1" / "checkpoint-8").is_dir(), "the run has gone back behind it"


def test_on_another_disk_there_is_nothing(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    join(monkeypatch, 2, 1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert take_over(checkpoints)
    assert checkpoints.saver.committed == list[Committed]()


def test_checkpoints_of_another_run_are_set_aside(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch, 2, 1)
    checkpoints.run_id, checkpoints.saver.committed = "another", []
    assert take_over(checkpoints)
    assert names(checkpoints) == []
    assert len(list((checkpoints.folder / "earlier-1").glob("checkpoint-*"))) == 3

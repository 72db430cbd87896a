"""What lies in a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from scenarios.task import make_trainer

from trainer_kit.checkpoint import Retention
from trainer_kit.checkpoint.format.inventory import checkpoints_at, excess, inspect, newest_progress
from trainer_kit.errors import CheckpointError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    make_trainer(folder, max_steps=6, save_steps=2, metric_for_best_model="eval_loss", eval_steps=2).train()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def names(found: list[Path]) -> list[str]:
    return [path.name for path in found]


def test_a_run_and_one_of_its_checkpoints_are_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(checkpoints_at(run)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert checkpoints_at(run / "checkpoint-4") == [run / "checkpoint-4"]
    monkeypatch.chdir(run / "checkpoint-4")
    assert names(checkpoints_at(Path())) == ["checkpoint-4"]
    (run / "checkpoint-4" / "manifest.json").unlink()
    assert names(checkpoints_at(run / "checkpoint-4")) == ["checkpoint-4"]  # a damaged one


def test_other_paths_are_answered_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, what in (("file", "is a file"), ("gone", "does not exist"), (".", "holds no checkpoints")):
        with pytest.raises(CheckpointError, match=f"{what}; give the output_dir of a run"):
            checkpoints_at(tmp_path / path)


def test_a_quick_look_compares_sizes_and_a_whole_one_checksums(run: Path) -> None:
    checkpoint = run / "checkpoint-4"
    whole = inspect(checkpoint)
    assert (whole.problem, whole.is_damaged) == (None, False)
    assert whole.manifest is not None
    assert whole.size == sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    file = checkpoint / "state" / "trainer.json"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    assert inspect(checkpoint, quick=True).problem is None
    damaged = inspect(checkpoint)
    assert damaged.is_damaged
    assert damaged.problem is not None
    assert "trainer.json" in damaged.problem
    file.write_bytes(content[:-1])
    assert inspect(checkpoint, quick=True).is_damaged


def test_without_a_manifest_it_is_none_of_ours(run: Path) -> None:
    (run / "checkpoint-4" / "manifest.json").unlink()
    found = inspect(run / "checkpoint-4")
    assert found.problem is not None
    assert (found.manifest, found.is_damaged) == (None, False)


def test_progress_is_that_of_the_newest_that_can_be_read(run: Path) -> None:
    found = checkpoints_at(run)
    known = newest_progress(found)
    assert known is not None
    assert [each.name for each in known.committed] == names(found)
    assert (known.metric_name, known.greater_is_better) == ("eval_loss", False)
    assert known.best_step in (2, 4, 6)
    (run / "checkpoint-6" / "state" / "trainer.json").write_text("{")
    older = newest_progress(found)
    assert older is not None
    assert (older.run_id, [each.name for each in older.committed]) == (known.run_id, names(found)[:2])
    assert newest_progress([]) is None


def test_what_a_rule_would_delete(run: Path) -> None:
    found = checkpoints_at(run)
    known = newest_progress(found)
    assert known is not None
    entries = [inspect(path, quick=True) for path in found]
    stays = {"checkpoint-6", f"checkpoint-{known.best_step}"}
    gone = excess(entries, known, Retention(1))
    assert {entry.directory.name for entry in gone} == {*names(found)} - stays
    assert excess(entries, known, Retention()) == []

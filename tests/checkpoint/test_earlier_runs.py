"""Files of another run in the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenarios.task import StopAt, make_trainer

from trainer_kit.callbacks import read_log
from trainer_kit.report.history import RunHistory


def test_a_new_run_sets_earlier_checkpoints_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, max_steps=3).train()
    make_trainer(tmp_path, max_steps=2).train()
    assert (tmp_path / "earlier-1" / "checkpoint-3" / "manifest.json").is_file()
    assert not (tmp_path / "checkpoint-3").exists()
    assert "earlier-1" in caplog.text


def test_a_damaged_checkpoint_of_the_run_is_set_aside_as_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, max_steps=4, save_steps=2).train()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    make_trainer(tmp_path, max_steps=6, save_steps=2).train(resume_from_checkpoint=True)
    assert f"moved checkpoint-4, which this run does not resume from, from {tmp_path} to" in caplog.text
    assert "set resume_from_checkpoint=True" not in caplog.text


def tags(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("events.out.*"))


def test_checkpoints_of_transformers_are_set_aside_without_the_advice_to_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    make_trainer(tmp_path).train()
    assert f"moved checkpoint-2 of another run from {tmp_path} to {tmp_path}/earlier-1\n" in caplog.text


def test_the_records_of_another_run_go_with_its_checkpoints(tmp_path: Path) -> None:
    def train(resume: bool | None = None, **changes: Any) -> list[dict[str, Any]]:
        options = {"report_to": ["jsonl", "tensorboard"], "save_strategy": "no", "max_steps": 3}
        trainer = make_trainer(tmp_path, **(options | changes))
        trainer.evaluate()
        trainer.train(resume_from_checkpoint=resume)
        return read_log(tmp_path / "log.jsonl")

    train()
    (tmp_path / "report.html").write_text("of the first run")
    first = (tmp_path / "log.jsonl").read_bytes()
    records = train()
    assert [record["event"] for record in records].count("start") == 1
    earlier = tmp_path / "earlier-1"
    assert (earlier / "log.jsonl").read_bytes().startswith(first)
    assert (earlier / "report.html").read_text() == "of the first run"
    assert len(tags(earlier)) == 1
    assert len(tags(tmp_path / "logs")) == 3  # of two evaluations, each before its training, and of this run
    assert len(RunHistory(tmp_path).starts) == 1

    train(resume=True)  # there is no checkpoint, but it is the same run
    assert not (tmp_path / "earlier-2").exists()
    assert len(RunHistory(tmp_path).starts) == 2


def test_the_records_of_another_run_go_where_a_run_of_another_folder_goes_on(tmp_path: Path) -> None:
    make_trainer(tmp_path / "first", max_steps=4, save_steps=4).train()
    make_trainer(tmp_path / "used", report_to=["jsonl"], max_steps=2).train()
    trainer = make_trainer(tmp_path / "used", report_to=["jsonl"], max_steps=6)
    trainer.train(resume_from_checkpoint=tmp_path / "first" / "checkpoint-4")
    records = read_log(tmp_path / "used" / "log.jsonl")
    assert [record["step"] for record in records if record["event"] == "start"] == [4]
    assert (tmp_path / "used" / "earlier-1" / "log.jsonl").is_file()


def test_events_that_lie_elsewhere_are_left_there(tmp_path: Path) -> None:
    for _ in range(2):
        make_trainer(
            tmp_path / "run", report_to=["tensorboard"], max_steps=2, logging_dir=str(tmp_path / "shared")
        ).train()
    assert len(tags(tmp_path / "shared")) == 2


def test_the_abandoned_end_of_a_run_is_set_aside(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_steps=2, max_steps=6).train()
    make_trainer(tmp_path, StopAt(3), save_steps=50).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    assert (tmp_path / "earlier-1" / "checkpoint-6" / "manifest.json").is_file()

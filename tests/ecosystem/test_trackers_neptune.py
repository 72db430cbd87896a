"""Records at neptune.ai, read back from the operations that its client writes offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.tracked_training import losses, make_trainer

from trainer_kit import Accelerator
from trainer_kit.trackers import NeptuneTracker

neptune = pytest.importorskip("neptune")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEPTUNE_MODE", "offline")


class Run:
    """What a folder of Neptune holds."""

    def __init__(self, folder: Path) -> None:
        self.series: dict[str, list[tuple[float, Any]]] = {}
        self.values: dict[str, Any] = {}
        self.uploads: list[str] = []
        decoder = json.JSONDecoder()
        for path in sorted(folder.rglob("data-*.log")):
            text, position = path.read_text(), 0
            while position < len(text.rstrip()):
                entry, position = decoder.raw_decode(text, position)
                position = len(text) - len(text[position:].lstrip())
                self._read(entry["obj"])

    def _read(self, operation: dict[str, Any]) -> None:
        kind, path = operation["type"], "/".join(operation["path"])
        if kind in ("LogFloats", "LogStrings"):
            self.series.setdefault(path, []).extend((each["step"], each["value"]) for each in operation["values"])
        elif kind.startswith("Assign"):
            self.values[path] = operation["value"]
        elif kind.startswith("Upload"):
            self.uploads.append(path)


def runs(tmp_path: Path) -> list[Run]:
    folders = (tmp_path / ".neptune" / "offline").glob("run__*")
    return [Run(folder) for folder in sorted(folders, key=lambda path: path.stat().st_ctime_ns)]


def test_a_training_and_its_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"report_artifacts": ["last"], "project": "me/my-project"}
    first_trainer = make_trainer("run", ["jsonl", "neptune"], max_steps=4, **options)
    first_trainer.train()
    trainer = make_trainer("run", ["jsonl", "neptune"], **options)
    trainer.train(resume_from_checkpoint=True)
    ids = [each.events.state_dict()["Tracking"]["runs"]["neptune"] for each in (first_trainer, trainer)]
    assert ids[0] == ids[1]
    first, second = sorted(runs(tmp_path), key=lambda run: run.series["train/loss"][0][0])
    assert first.series["train/loss"] + second.series["train/loss"] == list(losses(tmp_path / "run").items())
    assert [step for step, _ in first.series["eval/loss"]] == [3, 4]
    assert (first.values["parameters/learning_rate"], first.values["sys/name"]) == (0.1, "my run")
    assert second.uploads == ["last-checkpoint"]


def test_an_accelerator(tmp_path: Path) -> None:
    run = neptune.init_run(mode="offline")
    accelerator = Accelerator(cpu=True, log_with=[NeptuneTracker(run=run)])
    accelerator.init_trackers("theirs", {"lr": 0.1})
    accelerator.log({"loss": 0.5, "nothing": float("nan"), "note": "text"}, step=3)
    accelerator.end_training()
    run["after"] = 1
    run.stop()
    (found,) = runs(tmp_path)
    assert found.series["loss"] == [(3, 0.5)]
    assert found.series["not_finite/nothing"] == [(3, "nan")]
    assert found.values["after"] == 1

"""Records at Comet, read back from the archives that its client writes offline."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.tracked_training import losses, make_trainer

from trainer_kit import Accelerator
from trainer_kit.trackers import CometMLTracker

comet_ml = pytest.importorskip("comet_ml")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "offline"))
    monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")
    (tmp_path / "offline").mkdir()


class Archive:
    """What an archive holds."""

    def __init__(self, path: Path) -> None:
        self.metrics: dict[str, list[tuple[int, Any]]] = {}
        self.parameters: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.files: list[str] = []
        with zipfile.ZipFile(path) as archive:
            self.experiment = json.loads(archive.read("experiment.json"))
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        for message in messages:
            payload = message["payload"]
            if message["type"] == "metric_msg":
                metric = payload["metric"]
                self.metrics.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
            elif message["type"] == "parameter_msg":
                parameter = payload.get("param") or payload["params"]
                self.parameters[parameter["paramName"]] = parameter["paramValue"]
            elif message["type"] == "log_other":
                self.others[payload["key"]] = payload["value"]
            elif message["type"] == "file_upload":
                self.files.append(payload["additional_params"].get("fileName") or payload["file_path"])


def archives(folder: Path) -> list[Archive]:
    paths = sorted((folder / "offline").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
    return [Archive(path) for path in paths]


def test_a_training_and_its_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"report_artifacts": ["last"], "project": "my-project"}
    make_trainer("run", ["jsonl", CometMLTracker(online=False)], max_steps=4, **options).train()
    make_trainer("run", ["jsonl", CometMLTracker(online=False)], **options).train(resume_from_checkpoint=True)
    first, second = archives(tmp_path)
    assert first.experiment["offline_id"] == second.experiment["offline_id"]
    assert (first.experiment["project_name"], first.others["Name"]) == ("my-project", "my run")
    expected = losses(tmp_path / "run")
    assert dict(first.metrics["train/loss"] + second.metrics["train/loss"]) == expected
    assert [step for step, _ in second.metrics["train/loss"]] == [5, 6]
    assert first.parameters["learning_rate"] == 0.1
    assert (first.others["status"], second.others["status"]) == ("finished", "finished")
    assert any(name.endswith("model.safetensors") for name in second.files)


def test_an_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="comet_ml")
    accelerator.init_trackers("theirs", {"lr": 0.1, "model": {"h": 3}}, init_kwargs={"comet_ml": {"online": False}})
    accelerator.log({"loss": 0.5, "nothing": float("nan"), "note": "text", "pair": {"a": 2}}, step=3)
    accelerator.get_tracker("comet_ml").log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=3)
    accelerator.end_training()
    (found,) = archives(tmp_path)
    assert found.experiment["project_name"] == "theirs"
    assert (found.metrics["loss"], found.metrics["pair/a"]) == ([(3, 0.5)], [(3, 2.0)])
    assert found.metrics["nothing"] == [(3, "NaN")]
    assert (found.others["note"], found.parameters["model/h"]) == ("text", 3)


def test_an_experiment_of_the_program_is_used(tmp_path: Path) -> None:
    experiment = comet_ml.start(online=False, project_name="theirs")
    make_trainer("run", ["comet_ml"], eval_strategy="no").train()
    assert not experiment.ended
    experiment.end()
    (found,) = archives(tmp_path)
    assert len(found.metrics["train/loss"]) == 6


def test_no_login_is_an_error_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    monkeypatch.setenv("COMET_CONFIG", str(tmp_path / "none"))
    trainer = make_trainer("run", ["comet_ml"])
    with pytest.raises(Exception, match="comet_ml cannot begin a run"):
        trainer.train()
    assert trainer.run.state.step == 0

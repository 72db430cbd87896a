"""Records of SwanLab, read back with its own reader from the files that its client writes offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from kit.tracked_training import losses, make_trainer

from trainer_kit import Accelerator

swanlab = pytest.importorskip("swanlab")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWANLAB_MODE", "offline")


class Run:
    """What a folder of SwanLab holds."""

    def __init__(self, folder: Path) -> None:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        self.config = yaml.safe_load((folder / "files" / "config.yaml").read_text())
        self.id = folder.name.rpartition("-")[2]
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.media: set[str] = set()
        reader = DataStoreReader()
        reader.open(next(folder.glob("*.swanlab")))
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "start":
                self.project, self.name = record.start.project, record.start.name
            elif kind == "scalar":
                self.scalars.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
            elif kind == "media":
                self.media.add(record.media.key)
            elif kind == "finish":
                self.state = record.finish.state


def runs(tmp_path: Path) -> list[Run]:
    return [Run(folder) for folder in sorted((tmp_path / "swanlog").glob("run-*"), key=lambda path: path.stat().st_ino)]


def test_a_training_and_its_resume(tmp_path: Path) -> None:
    make_trainer("run", ["jsonl", "swanlab"], max_steps=4).train()
    make_trainer("run", ["jsonl", "swanlab"]).train(resume_from_checkpoint=True)
    found: list[Any] = sorted(runs(tmp_path), key=lambda run: run.scalars["train/loss"])
    first, second = sorted(found, key=lambda run: run.scalars["train/loss"][0][0])
    assert first.id == second.id
    assert (first.project, first.name) == ("my-project", "my run")
    assert first.scalars["train/loss"] + second.scalars["train/loss"] == list(losses(tmp_path / "run").items())
    assert [step for step, _ in first.scalars["eval/loss"]] == [3, 4]
    assert first.config["learning_rate"]["value"] == 0.1


def test_a_failed_training_is_marked(tmp_path: Path) -> None:
    trainer = make_trainer("run", ["swanlab"], learning_rate=1e38, max_grad_norm=0.0, optim="sgd")
    with pytest.raises(Exception, match="finite"):
        trainer.train()
    make_trainer("run", ["swanlab"]).train()
    failed, finished = sorted(runs(tmp_path), key=lambda run: len(run.scalars["train/loss"]))
    assert failed.state != finished.state


def test_an_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="swanlab")
    accelerator.init_trackers("theirs", {"lr": 0.1}, init_kwargs={"swanlab": {"name": "mine"}})
    accelerator.log({"loss": 0.5, "note": "text", "pair": {"a": 2}}, step=3)
    accelerator.get_tracker("swanlab").log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=3)
    accelerator.end_training()
    (run,) = runs(tmp_path)
    assert (run.project, run.name) == ("theirs", "mine")
    assert run.scalars == {"loss": [(3, 0.5)], "pair/a": [(3, 2.0)]}
    assert run.media == {"note", "picture"}

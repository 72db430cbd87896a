"""Records of DVCLive, read back from its files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from kit.tracked_training import losses, make_trainer

from trainer_kit import Accelerator
from trainer_kit.trackers import DVCLiveTracker

dvclive = pytest.importorskip("dvclive")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (
        "git init -q .", "git config user.email a@b.c", "git config user.name a", "dvc init -q",
        "git commit -q --allow-empty -am begin",
    ):  # fmt: skip
        subprocess.run([sys.executable, "-m", *command.split()] if command[0] == "d" else command.split(), check=True)


def history(tag: str) -> list[tuple[int, float]]:
    with (Path("dvclive/plots/metrics") / f"{tag}.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [(int(row["step"]), float(row[tag.rpartition("/")[2]])) for row in rows]


def test_a_training_and_its_resume() -> None:
    make_trainer("run", ["jsonl", "dvclive"], max_steps=4).train()
    trainer = make_trainer("run", ["jsonl", "dvclive"], report_artifacts=["last"])
    trainer.train(resume_from_checkpoint=True)
    trainer.evaluate()
    assert history("train/loss") == list(losses(Path("run")).items())
    assert [step for step, _ in history("eval/loss")] == [3, 4, 6, 6]
    parameters = yaml.safe_load(Path("dvclive/params.yaml").read_text())
    assert (parameters["learning_rate"], "max_grad_value" in parameters) == (0.1, False)
    assert json.loads(Path("dvclive/metrics.json").read_text())["step"] == 6
    assert Path("run/checkpoint-6.dvc").exists()


def test_an_accelerator() -> None:
    live = dvclive.Live(save_dvc_exp=False)
    accelerator = Accelerator(cpu=True, log_with=[DVCLiveTracker(live=live)])
    accelerator.init_trackers("theirs", {"lr": 0.1, "nothing": None})
    accelerator.log({"loss": 0.5, "note": "text"}, step=3)
    accelerator.log({"loss": 0.25})
    accelerator.get_tracker("dvclive").log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=3)
    accelerator.end_training()
    live.end()
    assert [value for _, value in history("loss")] == [0.5, 0.25]
    assert json.loads(Path("dvclive/metrics.json").read_text())["note"] == "text"
    assert list(Path("dvclive/plots/images").glob("**/*.png"))

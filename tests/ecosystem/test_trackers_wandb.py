"""Records at Weights & Biases, read back from the logs that its client writes offline."""

from __future__ import annotations

import json
import math
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.tracked_training import in_a_process, losses, make_trainer

from trainer_kit import Accelerator
from trainer_kit.trackers import WandBTracker
from trainer_kit.trackers.wandb import STEP

wandb = pytest.importorskip("wandb")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

_BLOCK, _HEADER = 32768, 7
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    yield
    wandb.teardown()  # else the client keeps this test's folder and mode


def records(path: Path) -> Iterator[Any]:
    """The messages of a log, which has LevelDB's format: blocks of fragments with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # the whole message, or its last fragment
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


class Run:
    """What a log holds."""

    def __init__(self, path: Path) -> None:
        self.id = path.stem.removeprefix("run-")
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.artifacts: list[tuple[str, str, list[str]]] = []
        self.exit_code: int | None = None
        self.step_metrics: list[tuple[str, str]] = []
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert record.run.run_id == self.id
                self.project, self.name = record.run.project, record.run.display_name
                self._update(record.run.config.update)
            elif kind == "config":
                self._update(record.config.update)
            elif kind == "history":
                items = record.history.item
                self.history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
            elif kind == "metric":
                self.step_metrics.append((record.metric.glob_name or record.metric.name, record.metric.step_metric))
            elif kind == "artifact":
                paths = [entry.path for entry in record.artifact.manifest.contents]
                self.artifacts.append((record.artifact.name, record.artifact.type, paths))

    def _update(self, items: Any) -> None:
        for item in items:
            self.config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)

    def values(self, tag: str) -> list[tuple[int, float]]:
        return [(row[STEP], row[tag]) for row in self.history if tag in row]


def runs(folder: Path) -> list[Run]:
    """The runs below a folder, oldest first."""
    wandb.teardown()  # which waits until the client's own process has written everything
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [Run(path) for path in paths]


def test_a_training(tmp_path: Path) -> None:
    trainer = make_trainer("run", ["jsonl", "html", "wandb"], report_artifacts=["report", "last"])
    output = trainer.train()
    (run,) = runs(tmp_path)
    assert (run.project, run.name, run.exit_code) == ("my-project", "my run", 0)
    assert run.values("train/loss") == list(losses(tmp_path / "run").items())
    assert [step for step, _ in run.values("eval/loss")] == [3, 6]
    assert run.values("train/train_loss") == [(6, output.training_loss)]
    assert ("*", STEP) in run.step_metrics
    assert {name: run.config[name] for name in ("learning_rate", "run_name", "report_to")} == {
        "learning_rate": 0.1, "run_name": "my run", "report_to": ["jsonl", "html", "wandb"],
    }  # fmt: skip
    report, last = run.artifacts
    assert report == (f"report-{run.id}", "report", ["report.html"])
    assert last[:2] == (f"last-checkpoint-{run.id}", "model")
    assert {"model.safetensors", "manifest.json"} <= {*last[2]}
    assert wandb.run is None


@pytest.mark.usefixtures("preloaded_python")
def test_a_killed_training_continues_its_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": "run", "report_to": ["jsonl", "wandb"]}
    assert in_a_process(tmp_path, kill_at=5, **options) == -signal.SIGKILL
    assert in_a_process(tmp_path, resume=True, **options) == 0
    first, second = runs(tmp_path)
    assert first.id == second.id
    assert (first.exit_code, second.exit_code) == (None, 0)
    # A kill loses what the client's own process had not written: in a short run, all records.
    expected = losses(tmp_path / "run")
    assert set(first.values("train/loss")) <= {*expected.items()}
    assert second.values("train/loss") == [(5, expected[5]), (6, expected[6])]


def test_evaluations_after_training_belong_to_the_run(tmp_path: Path) -> None:
    trainer = make_trainer("run", ["wandb"])
    trainer.train()
    metrics = trainer.evaluate()
    first, second = runs(tmp_path)
    assert first.id == second.id
    assert second.values("eval/loss") == [(6, metrics["eval_loss"])]


def test_a_run_of_the_program_is_used(tmp_path: Path) -> None:
    run = wandb.init(project="theirs", config={"mine": 1})
    make_trainer("run", ["jsonl", "wandb"]).train()
    assert wandb.run is run
    run.log({"after": 1})
    run.finish()
    (found,) = runs(tmp_path)
    assert found.project == "theirs"
    assert found.config["mine"] == 1
    assert [loss for row in found.history if (loss := row.get("train/loss"))] == [*losses(tmp_path / "run").values()]
    assert "after" in found.history[-1]


def test_a_failed_training_is_marked(tmp_path: Path) -> None:
    trainer = make_trainer("run", ["wandb"], learning_rate=1e38, max_grad_norm=0.0, optim="sgd")
    with pytest.raises(Exception, match="finite"):
        trainer.train()
    assert [run.exit_code for run in runs(tmp_path)] == [1]


def test_no_login_is_an_error_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trainer = make_trainer("run", ["wandb"])
    with pytest.raises(Exception, match=r"wandb cannot begin a run: .*(api_key|API key|login)"):
        trainer.train()
    assert trainer.run.state.step == 0


def test_an_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("theirs", {"lr": 0.1}, init_kwargs={"wandb": {"name": "mine", "tags": ["a"]}})
    accelerator.log({"loss": 0.5, "nothing": math.nan}, step=3)
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=4)
    tracker.log_table("table", columns=["a"], data=[[1]], step=4)
    assert accelerator.get_tracker("wandb", unwrap=True) is wandb.run
    accelerator.end_training()
    (run,) = runs(tmp_path)
    assert (run.project, run.name, run.config["lr"]) == ("theirs", "mine", 0.1)
    assert run.values("loss") == [(3, 0.5)]
    assert math.isnan(run.values("nothing")[0][1])
    assert [step for step, _ in run.values("picture/_type") + run.values("picture")] == [4]


def test_options_are_those_of_the_package(tmp_path: Path) -> None:
    tracker = WandBTracker("given", group="a group", id="given-id")
    make_trainer("run", [tracker]).train()
    (run,) = runs(tmp_path)
    assert (run.project, run.id) == ("given", "given-id")

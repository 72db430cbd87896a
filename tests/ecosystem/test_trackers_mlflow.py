"""Records at MLflow, read back from its database."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.tracked_training import in_a_process, losses, make_trainer

from trainer_kit import Accelerator
from trainer_kit.trackers import MLflowTracker

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("alembic")  # of MLflow's databases

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield mlflow.MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()


def runs(client: Any, project: str = "my-project") -> list[Any]:
    experiment = client.get_experiment_by_name(project)
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


def values(client: Any, run: Any, tag: str) -> list[tuple[int, float]]:
    """The values of a metric in the order of their steps, and of time."""
    history = client.get_metric_history(run.info.run_id, tag)
    return [(each.step, each.value) for each in sorted(history, key=lambda each: (each.step, each.timestamp))]


def test_a_training(tmp_path: Path, client: Any) -> None:
    trainer = make_trainer("run", ["jsonl", "html", "mlflow"], report_artifacts=["report", "last"])
    output = trainer.train()
    (run,) = runs(client)
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert values(client, run, "train/loss") == list(losses(tmp_path / "run").items())
    assert [step for step, _ in values(client, run, "eval/loss")] == [3, 6]
    assert values(client, run, "train/train_loss") == [(6, output.training_loss)]
    assert run.data.params["learning_rate"] == "0.1"
    assert run.data.params["report_to"] == "['jsonl', 'html', 'mlflow']"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "report")] == ["report/report.html"]
    files = {file.path for file in client.list_artifacts(run.info.run_id, "last-checkpoint")}
    assert "last-checkpoint/model.safetensors" in files
    assert mlflow.active_run() is None


@pytest.mark.usefixtures("preloaded_python")
def test_a_killed_training_continues_its_run(tmp_path: Path, client: Any) -> None:
    options: dict[str, Any] = {"folder": "run", "report_to": ["jsonl", "mlflow"]}
    assert in_a_process(tmp_path, kill_at=5, **options) == -signal.SIGKILL
    assert [run.info.status for run in runs(client)] == ["RUNNING"]
    assert in_a_process(tmp_path, resume=True, learning_rate=0.2, **options) == 0
    (run,) = runs(client)
    assert run.info.status == "FINISHED"
    expected = losses(tmp_path / "run")
    assert dict(values(client, run, "train/loss")) == expected  # the latest of each step
    assert run.data.params["learning_rate"] == "0.1"  # which MLflow never changes
    assert run.data.tags["learning_rate"] == "0.2"


def test_a_run_of_the_program_is_used(tmp_path: Path, client: Any) -> None:
    mlflow.set_experiment("theirs")
    with mlflow.start_run(run_name="their run") as run:
        make_trainer("run", ["jsonl", "mlflow"]).train()
        assert mlflow.active_run().info.run_id == run.info.run_id
    (found,) = runs(client, "theirs")
    assert found.info.run_id == run.info.run_id
    assert values(client, found, "train/loss") == list(losses(tmp_path / "run").items())
    assert client.get_experiment_by_name("my-project") is None


def test_a_failed_training_is_marked(client: Any) -> None:
    trainer = make_trainer("run", ["mlflow"], learning_rate=1e38, max_grad_norm=0.0, optim="sgd")
    with pytest.raises(Exception, match="finite"):
        trainer.train()
    assert [run.info.status for run in runs(client)] == ["FAILED"]
    make_trainer("run", ["mlflow"]).train()
    assert [run.info.status for run in runs(client)] == ["FAILED", "FINISHED"]


def test_a_run_that_is_gone_cannot_be_continued(client: Any) -> None:
    make_trainer("run", ["mlflow"], max_steps=4).train()
    client.delete_run(runs(client)[0].info.run_id)
    with pytest.raises(Exception, match=r"mlflow cannot continue the run \w+: MlflowException"):
        make_trainer("run", ["mlflow"]).train(resume_from_checkpoint=True)


def test_an_accelerator(tmp_path: Path, client: Any) -> None:
    (tmp_path / "file.txt").write_text("text")
    accelerator = Accelerator(cpu=True, log_with="mlflow")
    options = {"run_name": "mine", "tags": {"a": "b"}, "nested_run": False, "logging_dir": str(tmp_path / "files")}
    accelerator.init_trackers("theirs", {"lr": 0.1, "long": "x" * 9000}, init_kwargs={"mlflow": options})
    accelerator.log({"f1@10": 0.5, "nothing": math.nan, "note": "text", "pair": {"a": 2}}, step=3)
    accelerator.get_tracker("mlflow").log_artifact(str(tmp_path / "file.txt"))
    accelerator.end_training()
    (run,) = runs(client, "theirs")
    assert (run.info.run_name, run.data.tags["a"], run.data.tags["note"]) == ("mine", "b", "text")
    assert values(client, run, "f1_10") == [(3, 0.5)]
    assert values(client, run, "pair/a") == [(3, 2.0)]
    assert math.isnan(values(client, run, "nothing")[0][1])
    assert (run.data.params["lr"], len(run.data.params["long"])) == ("0.1", 6000)
    assert (tmp_path / "files").exists()
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["file.txt"]


def test_a_run_can_be_named(client: Any) -> None:
    make_trainer("run", [MLflowTracker("given", description="about it")]).train()
    (run,) = runs(client, "given")
    assert run.data.tags["mlflow.note.content"] == "about it"

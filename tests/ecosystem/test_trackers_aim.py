"""Records of Aim, read back from its repository."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.tracked_training import in_a_process, losses, make_trainer

from trainer_kit import Accelerator
from trainer_kit.trackers import AimTracker

aim = pytest.importorskip("aim")
Context = pytest.importorskip("aim.storage.context").Context

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # Aim keeps settings there


def runs() -> list[Any]:
    repo = aim.Repo(str(Path.cwd()))  # "." would be the repository of another test, which Aim keeps
    repo._recreate_index()  # as `aim up` does in the background
    return list(repo.iter_runs())


def history(run: Any, name: str, subset: str = "train") -> list[tuple[int, float]]:
    metric = run.get_metric(name, Context({"subset": subset}))
    steps, (values, *_) = metric.data.items_list()
    return list(zip(steps, values, strict=True))


def test_a_training_that_is_killed_continues_its_run(tmp_path: Path) -> None:
    status = in_a_process(tmp_path, folder="run", report_to=["jsonl", "aim"], kill_at=5)
    assert status == -signal.SIGKILL
    trainer = make_trainer("run", ["jsonl", AimTracker(repo=str(tmp_path))], report_artifacts=["last"])
    trainer.train(resume_from_checkpoint=True)
    trainer.evaluate()
    [run] = runs()
    assert (run.name, run.experiment) == ("my run", "my-project")
    assert run["hparams"]["learning_rate"] == 0.1
    assert dict(history(run, "loss")) == pytest.approx(losses(Path("run")))
    assert {step for step, _ in history(run, "loss", "val")} == {3, 6}
    assert any(name.startswith("last-checkpoint/") for name in run.artifacts)
    assert Path(".aim/artifacts", run.hash).is_dir()


def test_an_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=[AimTracker(repo=str(tmp_path))])
    accelerator.init_trackers("theirs", {"lr": 0.1, "nothing": None, "sizes": [1, 2]})
    accelerator.log({"loss": 0.5, "note": "text", "eval_loss": math.nan}, step=3)
    accelerator.log({"loss": 0.25}, step=4)
    accelerator.get_tracker("aim").log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=3)
    accelerator.end_training()
    [run] = runs()
    assert run["hparams"] == {"lr": 0.1, "nothing": None, "sizes": [1, 2]}
    assert history(run, "loss") == [(3, 0.5), (4, 0.25)]
    [(step, value)] = history(run, "loss", "val")
    assert step == 3
    assert math.isnan(value)


def test_a_run_of_the_programs_own_stays_open(tmp_path: Path) -> None:
    own = aim.Run(repo=str(tmp_path), experiment="own", capture_terminal_logs=False, system_tracking_interval=None)
    accelerator = Accelerator(cpu=True, log_with=[AimTracker(run=own)])
    accelerator.init_trackers("theirs")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    own.track(0.25, name="loss", step=2, context={"subset": "train"})
    own.close()
    [run] = runs()
    assert run.experiment == "own"
    assert history(run, "loss") == [(1, 0.5), (2, 0.25)]

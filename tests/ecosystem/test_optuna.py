"""A search with optuna, as docs/en/how-to/tuning.md shows it: pruned trials, and killed ones that go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import Callback, NonFiniteError, Run, Trainer, TrainingArguments
from trainer_kit.report.facts import status
from trainer_kit.report.history import RunHistory

optuna = pytest.importorskip("optuna")

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the databases of the storage
]
STEPS = 24


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


class Pruning(Callback):
    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.trial.report(metrics["eval_loss"], run.state.step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


class KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make_objective(folder: Path, *callbacks: Callback) -> Callable[[Any], float]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(64, 4, generator=generator)
    data = [{"x": x, "labels": int(x.sum() > 0)} for x in points]

    def objective(trial: Any) -> float:
        first = optuna.storages.RetryHeartbeatStaleTrialCallback.retried_trial_number(trial.study.trials[trial.number])
        args = TrainingArguments(
            str(folder / str(trial.number if first is None else first)),
            learning_rate=trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
            max_steps=STEPS, eval_strategy="steps", eval_steps=4, save_steps=4, async_save=False, use_cpu=True,
            load_best_model_at_end=True, disable_tqdm=True, log_level="error", report_to=["jsonl"],
        )  # fmt: skip
        own = [Pruning(trial), *callbacks]
        trainer = Trainer(args=args, model_init=Net, train_dataset=data, eval_dataset=data[:32], callbacks=own)
        trainer.train(resume_from_checkpoint=first is not None)
        assert trainer.run.state.best_metric is not None
        return trainer.run.state.best_metric

    return objective


def make_study(folder: Path, **options: Any) -> Any:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), **options)


def retried(database: Path) -> Any:
    """A storage that finds a killed trial after 2 seconds, and has it tried again."""
    return optuna.storages.RDBStorage(
        f"sqlite:///{database}",
        heartbeat_interval=1,
        grace_period=2,
        heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(
            inherit_intermediate_values=True
        ),
    )


def test_a_pruned_trial_is_no_failure(tmp_path: Path) -> None:
    study = make_study(tmp_path, pruner=optuna.pruners.ThresholdPruner(upper=0.6, n_warmup_steps=8))
    study.optimize(make_objective(tmp_path), n_trials=8)
    states = [trial.state.name for trial in study.trials]
    assert set(states) == {"PRUNED", "COMPLETE"}
    for trial in study.trials:
        folder = tmp_path / str(trial.number)
        assert not list(folder.glob("crash-*"))
        expected = "pruned" if trial.state.name == "PRUNED" else "finished"
        assert status(RunHistory(folder)).word == expected


def test_a_new_search_in_old_folders_begins_each_trial_again(tmp_path: Path) -> None:
    def values(folder: Path, seed: int) -> list[float]:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # earlier runs are moved
            study.optimize(make_objective(folder), n_trials=2)
        return [trial.value for trial in study.trials]

    before = values(tmp_path / "search", 0)
    again = values(tmp_path / "search", 1)
    assert again == values(tmp_path / "alone", 1)
    assert again != before


def test_a_trial_that_diverges_fails_alone(tmp_path: Path) -> None:
    class Diverges(Callback):
        runs = 0

        def on_pre_optimizer_step(self, run: Run) -> None:
            if run.state.step == 0:
                self.runs += 1
            if self.runs == 1:
                run.model.layer.weight.grad.fill_(float("nan"))  # type: ignore[union-attr]

    study = make_study(tmp_path)
    study.optimize(make_objective(tmp_path, Diverges()), n_trials=3, catch=(NonFiniteError,))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.usefixtures("preloaded_python")
def test_a_killed_trial_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = make_study(tmp_path)
    undisturbed.optimize(make_objective(tmp_path / "undisturbed"), n_trials=1)

    killed = subprocess.run([sys.executable, __file__, str(tmp_path)], timeout=120, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    study = optuna.load_study(
        storage=retried(tmp_path / "search.db"), study_name="search", sampler=optuna.samplers.RandomSampler(seed=1)
    )
    assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    while study.trials[0].state.name == "RUNNING":
        optuna.storages.fail_stale_trials(study)
    study.optimize(make_objective(tmp_path / "killed"), n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.trials[1].params == study.trials[0].params == undisturbed.trials[0].params
    assert study.trials[1].value == undisturbed.trials[0].value
    assert study.trials[1].intermediate_values == undisturbed.trials[0].intermediate_values
    starts = RunHistory(tmp_path / "killed" / "0").starts
    assert [start.step for start in starts] == [0, 12]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    root = Path(sys.argv[1])
    study = make_study(root, storage=retried(root / "search.db"), study_name="search")
    study.optimize(make_objective(root / "killed", KillAt(14)), n_trials=1)

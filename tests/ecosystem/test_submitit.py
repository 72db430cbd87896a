"""Trainings in jobs of submitit: the signal of a time limit or a preemption saves, and the requeued job resumes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import free_port, on_ranks

from trainer_kit import Callback, Run, Trainer, TrainingArguments

submitit = pytest.importorskip("submitit")
cloudpickle = pytest.importorskip("cloudpickle")

pytestmark = pytest.mark.ecosystem

SAMPLES, STEPS, SIGNALLED = 80, 10, 4
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a job cannot import this module


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(x, 0.2, self.training)
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


class SignalAt(Callback):
    """Sends this process signals after a step."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def on_step_end(self, run: Run) -> None:
        for name in self.names if run.state.step == SIGNALLED else ():
            signal.raise_signal(getattr(signal, name))


class Starts(Callback):
    """Notes the step at which the training starts."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_begin(self, run: Run) -> None:
        self.steps.append(run.state.step)


def train(folder: Path, *names: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Train, and return the step at which the training starts, and the final weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, generator=generator), "labels": i % 2} for i in range(SAMPLES)]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=STEPS, save_strategy="epoch", report_to="none",
        use_cpu=True, learning_rate=0.1, disable_tqdm=True,
    )  # fmt: skip
    starts, model = Starts(), Net()
    Trainer(model, args, data, callbacks=[starts, SignalAt(names)]).train(resume_from_checkpoint=True)
    return starts.steps[0], model.state_dict()


class Training:
    """A job whose processes are sent signals in its first start."""

    def __init__(self, folder: Path, port: int, *names: str) -> None:
        self.folder, self.port, self.names = folder, port, names

    def __call__(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Train on all tasks of the job."""
        if int(os.environ.get("SUBMITIT_LOCAL_NTASKS", "1")) > 1:
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
            os.environ["MASTER_PORT"] = str(self.port)  # submitit's follows from the job's number, and may be in use
        return train(self.folder / "run", *self.names)

    def checkpoint(self) -> Any:
        """Return what submitit requeues."""
        return submitit.helpers.DelayedSubmission(self)


def results(training: Training, tasks: int) -> list[Any]:
    """Run a job, and return what each of its tasks returned."""
    executor = submitit.LocalExecutor(training.folder / "logs")
    executor.update_parameters(timeout_min=5, tasks_per_node=tasks)
    returned: list[Any] = executor.submit(training).results()
    return returned


@pytest.mark.parametrize(
    ("tasks", "names"), [(1, ("SIGUSR2",)), (2, ("SIGTERM", "SIGUSR2"))], ids=["one task", "two tasks after SIGTERM"]
)
def test_a_requeued_job_resumes_at_the_step_of_the_signal(tmp_path: Path, tasks: int, names: tuple[str, ...]) -> None:
    undisturbed = on_ranks(tasks, train, tmp_path / "undisturbed")
    requeued = results(Training(tmp_path / "requeued", free_port(), *names), tasks)
    for (_, expected), (start, weights) in zip(undisturbed, requeued, strict=True):
        assert start == SIGNALLED
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves its logs open
def test_a_job_in_this_process_trains(tmp_path: Path) -> None:
    job = submitit.DebugExecutor(tmp_path / "logs").submit(Training(tmp_path, free_port()))
    assert job.result()[0] == 0
    gc.collect()  # as a cycle may hold the logs, which would be found open in a later test

"""Small trainings on whatever data they are given, with the samples that every step trained on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import IterableDataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments


def rows(length: int = 22) -> list[dict[str, torch.Tensor]]:
    """Samples whose first feature is their index."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(length):
        x = torch.randn(4, generator=generator, dtype=torch.float64)
        x[0] = index
        found.append({"x": x, "labels": torch.tensor(index % 3)})
    return found


class Rows(IterableDataset[Any]):
    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(rows(self.length))


class Classifier(nn.Module):
    """A layer behind dropout, which shows whether a resume has the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.layer(F.dropout(x / 10, 0.1, self.training))
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Steps(Callback):
    """Records the indices of each step's samples on this process, and the losses."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.losses: list[float] = []
        self._step: list[int] = []

    def _take(self, run: Run) -> None:
        self._step += [int(each) for each in run.batch["x"][:, 0]]

    def on_substep_end(self, run: Run) -> None:
        self._take(run)

    def on_pre_optimizer_step(self, run: Run) -> None:
        self._take(run)
        self.samples.append(self._step)
        self._step = []

    def on_log(self, run: Run, record: Any) -> None:
        self.losses += [record["loss"]] if "loss" in record else []


def train(
    folder: Path | str, data: Any, resume: str | None = None, given: dict[str, Any] | None = None, **options: Any
) -> tuple[Trainer, Steps]:
    """Train a `Classifier` for two epochs with a checkpoint every three steps; `resume` names one of them."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_steps": 3,
        "log_level": "error",
    }  # fmt: skip
    steps, given = Steps(), dict(given or {})
    callbacks = [steps, *given.pop("callbacks", ())]
    trainer = Trainer(Classifier(), TrainingArguments(**(defaults | options)), data, callbacks=callbacks, **given)
    trainer.train(resume_from_checkpoint=f"{folder}/{resume}" if resume else None)
    return trainer, steps


def weights(trainer: Trainer) -> list[list[float]]:
    found: list[list[float]] = trainer.run.model.get_parameter("layer.weight").tolist()
    return found


def check_resume(
    folder: Path, make: Any, reads_again: bool = False, make_given: Any = dict, step: int = 3, **options: Any
) -> Steps:
    """Train once, and again from the checkpoint of a step with fresh objects; the rest must be equal to the bit."""
    whole, steps = train(folder, make(), given=make_given(), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, rest = train(folder, make(), f"checkpoint-{step}", given=make_given(), **options)
    said = [str(each.message) for each in caught if "resume" in str(each.message)]
    assert ["read again" in each for each in said] == [True] * reads_again
    assert rest.samples == steps.samples[step:]
    assert rest.losses[:-1] == steps.losses[step:-1]
    assert weights(resumed) == weights(whole)
    assert resumed.run.state == whole.run.state
    return steps

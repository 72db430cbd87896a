"""Mistakes of a user's end a run under XLA by an exception, never quietly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import xla_task
from kit.on_xla import ChildFailed, on_xla, try_on_xla

from trainer_kit import XLA

pytestmark = pytest.mark.xla


class Broken(xla_task.Points):
    """Its sample 30 cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 30:
            raise OSError("sample 30 cannot be read")
        return super().__getitem__(index)


class Hidden(xla_task.Net):
    """Has a layer in a list, which is not moved with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [torch.nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(self.layers[0](x), labels)


def train(folder: Path, workers: int = 0, **given: Any) -> None:
    trainer = xla_task.make_trainer(
        folder, "net", xla_task.strategy("xla"), dataloader_num_workers=workers,
        trainer={"data_collator": given.get("collate")},
    )  # fmt: skip
    trainer.run.train_dataset = given.get("dataset", trainer.run.train_dataset)
    trainer.run.model = given.get("model", trainer.run.model)
    trainer.train()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_collator_that_raises(tmp_path: Path, devices: int, workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("no such column")

    with pytest.raises(ChildFailed, match="no such column"):
        on_xla(devices, lambda: train(tmp_path, workers, collate=collate))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read(tmp_path: Path, workers: int) -> None:
    with pytest.raises(ChildFailed, match="sample 30 cannot be read"):
        on_xla(1, lambda: train(tmp_path, workers, dataset=Broken(50)))


def test_a_layer_on_another_device(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="Expected XLA tensor"):
        on_xla(1, lambda: train(tmp_path, model=Hidden()))


def test_devices_that_do_not_fit_are_refused() -> None:
    def used_before() -> None:
        import torch_xla

        torch.ones(2).to(torch_xla.device())
        XLA().setup()

    def no_such_device() -> None:
        os.environ["PJRT_DEVICE"] = "CUDA"
        XLA().setup()

    refused = {
        "XLA was used in this process before the Trainer": try_on_xla(2, used_before),
        "XLA finds no device of PJRT_DEVICE=CUDA": try_on_xla(1, no_such_device),
        "mesh={'data': 4} is for 4 devices, but there are 2": try_on_xla(2, XLA(mesh={"data": 4}).setup),
        "mesh={'data': 4} is for 4 devices, but there are 1": try_on_xla(1, XLA(mesh={"data": 4}).setup),
    }
    for sentence, ended in refused.items():
        assert f"ValueError: {sentence}" in ended.error

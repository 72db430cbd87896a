"""A model of diffusers: its own folder from `save_model`, which its own class loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from trainer_kit import Trainer, TrainingArguments, load_checkpoint_in_model  # noqa: E402

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore:Failed to load:UserWarning")]


def make(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(batch["sample"], batch["timestep"]).sample
    return torch.nn.functional.mse_loss(found, batch["noise"])


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    names = ("sample", "noise")
    return [
        {**{name: torch.randn(1, 8, 8, generator=generator) for name in names}, "timestep": torch.tensor(number)}
        for number in range(16)
    ]


def test_save_model_writes_its_own_folder_and_a_checkpoint_resumes(tmp_path: Path) -> None:
    def trainer(seed: int) -> Trainer:
        args = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=4, save_steps=2, per_device_train_batch_size=4, report_to=()
        )
        return Trainer(make(seed), args, rows(), compute_loss=loss)

    first, second = trainer(0), trainer(1)
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    second.save_model(tmp_path / "saved")
    expected = first.run.model.state_dict()
    loaded = diffusers.UNet2DModel.from_pretrained(tmp_path / "saved")
    assert loaded.config == first.run.model.config or dict(loaded.config)["block_out_channels"] == [8, 8]
    other = make(2)
    load_checkpoint_in_model(other, tmp_path / "run" / "checkpoint-4")
    for found in (loaded.state_dict(), other.state_dict()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not (tmp_path / "run" / "checkpoint-4" / "config.json").exists()

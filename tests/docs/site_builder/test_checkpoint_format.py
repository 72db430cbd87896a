"""The page of the format names what a checkpoint of a training holds, and says what each of it means."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from kit.trainer import arguments
from site_builder.checkpoint_format import checkpoint_format
from torch import nn

from trainer_kit import Trainer


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x - self.weight).square().mean()}


@pytest.mark.slow
def test_each_field_of_a_checkpoint_is_listed_with_its_meaning(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, save_strategy="steps")
    Trainer(Mean(), args, [{"x": torch.ones(())}] * 8).train()
    folder = tmp_path / "run" / "checkpoint-1"
    manifest = json.loads((folder / "manifest.json").read_text())
    state = json.loads((folder / "state" / "trainer.json").read_text())
    written = {*manifest, *state, *state["counters"], *state["plan"]}
    assert {"step", "run_id", "epoch", "order", "full_processes"} <= written
    page = checkpoint_format()
    rows = dict(re.findall(r"^\| `([\w./-]+)` \| (?:[^|]* \| )?([^|]*) \|$", page, re.MULTILINE))
    assert written - rows.keys() == set()
    assert [name for name, meaning in rows.items() if len(meaning) < 10] == []
    assert {file.relative_to(folder).as_posix() for file in folder.glob("state/*.json")} - rows.keys() == set()
    assert [name for name in next(iter(manifest["files"].values())) if f"`{name}`" not in page] == []

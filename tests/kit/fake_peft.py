"""The part of peft that trainer_kit calls, for tests without the package."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class FakeConfig:
    target_modules: set[str]
    base_model_name_or_path: str | None = None
    inference_mode: bool = False
    task_type: str | None = None
    is_prompt_learning: bool = False
    peft_type: str = "LORA"

    def save_pretrained(self, folder: str, auto_mapping_dict: dict[str, str] | None) -> None:
        content = {**vars(self), "auto_mapping": auto_mapping_dict}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(content))


class FakePeftModel(nn.Module):
    """A frozen layer and a buffer, with a matrix for each adapter."""

    def __init__(self, *adapters: str) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.lora = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 4)) for name in adapters})
        self.peft_config = {name: FakeConfig({"b", "a"}) for name in adapters}
        self.name_or_path = ""

    def get_base_model(self) -> FakePeftModel:
        return self

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for adapter in self.lora.values():
            x = self.base_layer(x) + x @ adapter
        return nn.functional.mse_loss(x, labels)


def get_peft_model_state_dict(
    model: FakePeftModel, state: dict[str, torch.Tensor], adapter: str, save_embedding_layers: bool | str
) -> dict[str, Any]:
    return {"lora": state[f"lora.{adapter}"]}


def fake_peft() -> types.ModuleType:
    module = types.ModuleType("peft")
    module.PeftModel = FakePeftModel  # type: ignore[attr-defined]
    module.get_peft_model_state_dict = get_peft_model_state_dict  # type: ignore[attr-defined]
    return module

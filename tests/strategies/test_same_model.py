"""Processes whose models or optimizers are not the same are refused before the first step, naming what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import RankFailed, free_port, try_on_ranks
from torch import nn

from trainer_kit import Accelerator, Trainer, TrainingArguments
from trainer_kit.config import environment

ORDERS = (["first", "second", "third"], ["first", "third", "second"])


class Named(nn.Module):
    """Layers of one size, made in the order of their names; counts its forward passes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for name in sorted(self.layers):
            x = self.layers[name](x)
        return x.square().mean()


def made(what: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    model: nn.Module = Named(ORDERS[rank if what in ("order", "ties") else 0])
    layers: Any = getattr(model, "layers", None)
    optimizer: torch.optim.Optimizer | None = None
    if what == "buffers":
        for name in ORDERS[rank]:
            model.register_buffer(name, torch.zeros(2))
    elif what == "ties" or (what == "tied on one" and rank == 1):
        layers["second"].weight = layers["third"].weight
    elif what == "frozen" and rank == 1:
        layers["second"].bias.requires_grad_(False)
    elif what == "memory" and rank == 1:
        layers["second"].weight = nn.Parameter(torch.ones(3, 3).t())
    elif what == "optimizer":
        optimizer = torch.optim.SGD([layers[name].weight for name in ORDERS[rank]], lr=0.1)
    elif what == "groups":
        groups = [{"params": list(layers[name].parameters())} for name in ORDERS[rank]]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    elif what == "rate":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    return model, optimizer


CASES = {
    "order": "parameter layers.third.weight on rank 1 stands where parameter layers.second.weight does on rank 0: the "
    "same things in another order",
    "buffers": "buffer third on rank 1 stands where buffer second does on rank 0",
    "ties": "parameter layers.third.weight on rank 1 stands where parameter layers.second.weight does on rank 0",
    "tied on one": "parameter layers.second.weight differs: '[3, 3] torch.float32, tied: layers.second.weight, "
    "layers.third.weight' on rank 1, '[3, 3] torch.float32' on rank 0",
    "frozen": "parameter layers.second.bias differs: '[3] torch.float32, frozen' on rank 1",
    "memory": "parameter layers.second.weight differs: '[3, 3] torch.float32, strides [1, 3]' on rank 1",
    "optimizer": "parameter layers.third.weight of the optimizer's group 0 on rank 1 stands where parameter "
    "layers.second.weight of the optimizer's group 0 does on rank 0",
    "groups": "parameter layers.second.weight of the optimizer's group 1 differs: 'nothing' on rank 1, '[3, 3]' on "
    "rank 0",
    "rate": "lr of the optimizer's group 0 differs: 0.2 on rank 1, 0.1 on rank 0",
}


def train(folder: str, what: str) -> None:
    model, optimizer = made(what, environment.place().rank)
    args = TrainingArguments(
        output_dir=folder, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
        save_strategy="no",
    )  # fmt: skip
    try:
        Trainer(model, args, [{"x": torch.ones(3)}] * 8, optimizer=optimizer).train()
    finally:
        assert model.calls == 0


def prepare(folder: str, what: str) -> None:
    model, optimizer = made(what, environment.place().rank)
    Accelerator(cpu=True).prepare(optimizer or torch.optim.SGD(model.parameters()), model)


@pytest.mark.distributed
@pytest.mark.parametrize("function", [train, prepare])
@pytest.mark.parametrize("what", CASES)
def test_what_differs_is_named_before_the_first_step(what: str, function: Any, tmp_path: Path) -> None:
    for result in try_on_ranks(2, function, str(tmp_path), what):
        assert isinstance(result, RankFailed), "it trained"
        assert isinstance(result.error, ValueError), result
        assert CASES[what] in str(result.error)


def prepare_the_same() -> list[float]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    models = [Named(ORDERS[0]), Named(ORDERS[1])]
    optimizer = torch.optim.AdamW([parameter for model in models for parameter in model.parameters()])
    accelerator.prepare(optimizer)  # before its models
    prepared = accelerator.prepare(*models)
    return [float(parameter.detach().sum()) for model in prepared for parameter in model.parameters()]


@pytest.mark.distributed
def test_the_same_models_are_taken() -> None:
    first, second = try_on_ranks(2, prepare_the_same)
    assert not isinstance(first, RankFailed), first
    assert first == second


OF_A_SET = """
from transformers import BertConfig, BertModel
import torch
from torch import nn
from trainer_kit import Trainer, TrainingArguments

class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        size = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=11)
        self.body = BertModel(BertConfig(**size), add_pooling_layer=False)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in {"sst2", "mnli", "qqp", "rte", "cola", "wnli"}})

    def forward(self, input_ids):
        hidden = self.body(input_ids).last_hidden_state
        return sum(head(hidden).square().mean() for head in self.heads.values())

args = TrainingArguments(output_dir="run", max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
                         per_device_train_batch_size=2, save_strategy="no")
output = Trainer(Tasks(), args, [{"input_ids": torch.tensor([1, 2, 3])}] * 16).train()
print("trained", output.global_step)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "trains"), [((1, 2), False), ((1, 1), True)])
def test_modules_made_from_a_set_of_strings(seeds: tuple[int, int], trains: bool, tmp_path: Path) -> None:
    """Processes hash strings in their own way, unless PYTHONHASHSEED says how."""
    (tmp_path / "train.py").write_text(OF_A_SET)
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank, seed in enumerate(seeds):
        own = place | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": 1}
        processes.append(
            subprocess.Popen(
                [sys.executable, "train.py"], cwd=tmp_path, env=os.environ | {k: str(v) for k, v in own.items()},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    texts = [process.communicate(timeout=240)[0] for process in processes]
    for text in texts:
        assert ("trained 2" in text) == trains, text
        if not trains:
            assert "the same things in another order" in text
            assert "PYTHONHASHSEED" in text

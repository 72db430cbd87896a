"""What fits, and options that need less."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kit.sized_models import perceptron, resnet
from torch import nn
from torch.utils.data import IterableDataset

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.memory import advise, estimate
from trainer_kit.memory.advice import LARGEST, largest_batch, resized

ARGS = TrainingArguments(use_cpu=True)


@pytest.fixture(scope="module")
def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return perceptron(1024)


@pytest.mark.slow
def test_a_step_that_does_not_fit(model_and_batch: tuple[nn.Module, Any]) -> None:
    model, batch = model_and_batch
    limit = estimate(model, ARGS, batch).peak - 1
    found = advise(model, ARGS, batch, device_memory=limit)
    assert found.fits is False
    assert found.largest_batch_size == 1023
    assert estimate(model, ARGS, resized(batch, 1023)).peak <= limit
    assert [option.peak for option in found.options] == sorted(option.peak for option in found.options)
    for option in found.options:
        assert option.peak < found.anatomy.peak
        assert option.fits is (option.peak <= limit)
    by_name = {option.name: option for option in found.options}
    smaller = by_name["per_device_train_batch_size=512, gradient_accumulation_steps=2"]
    assert smaller.changes == {"per_device_train_batch_size": 512, "gradient_accumulation_steps": 2}
    again = TrainingArguments(use_cpu=True, gradient_checkpointing=True)
    assert by_name["gradient_checkpointing=True"].peak == estimate(model, again, batch).peak
    selective = by_name["gradient_checkpointing={'policy': 'save_matmuls'}"]
    assert selective.changes == {"gradient_checkpointing": {"policy": "save_matmuls"}}
    assert selective.peak > by_name["gradient_checkpointing=True"].peak
    assert "mixed_precision='bf16'" in by_name
    assert "optim='adamw_8bit'" in by_name
    assert "the first half of the parameters frozen" in by_name
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
def test_text_and_json() -> None:
    model, batch = perceptron(4096)
    found = advise(model, ARGS, batch, device_memory="1MiB", device="cuda")
    table = found.table()
    assert "activations" in table
    assert "does not fit into 1 MiB; no micro-batch fits" in table
    assert "gradient_checkpointing=True" in table
    values = json.loads(json.dumps(found.to_dict()))
    assert values["fits"] is False
    assert values["largest_batch_size"] == 0
    assert values["anatomy"]["peak"] == found.anatomy.peak
    assert values["options"][0]["peak"] == found.options[0].peak


@pytest.mark.slow
def test_memory_of_a_device_that_is_not_known() -> None:
    model, batch = perceptron(8)
    found = advise(model, ARGS, batch, device="xpu")
    assert (found.fits, found.largest_batch_size, found.device_memory) == (None, None, None)
    assert "is not known" in found.table()
    assert advise(model, ARGS, batch).device_memory == psutil.virtual_memory().total
    with pytest.raises(ValueError, match="device_memory='24' is not known"):
        advise(model, ARGS, batch, device_memory="24")


def test_a_batch_norm_needs_two_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = torch.randn(4, 4)
    found = advise(model, ARGS, batch, device_memory=8, compute_loss=lambda model, batch: model(batch).sum())
    assert found.largest_batch_size == 0


def test_batches_of_another_size() -> None:
    _, batch = resnet(3)
    other = resized({**batch, "scale": torch.ones(())}, 7)
    assert other["labels"].tolist() == [batch["labels"][number % 3] for number in range(7)]
    assert other["pixel_values"].shape == (7, 3, 64, 64)
    assert other["pixel_values"].is_meta
    assert other["scale"].shape == ()


@pytest.mark.parametrize("start", [1, 7, 64, 3000])
@pytest.mark.parametrize(
    ("peak", "limit", "expected"),
    [
        (lambda samples: 1000 + 10 * samples, 3005, 200),
        (lambda samples: max(2000 + samples, 1000 + 10 * samples, 50 * samples), 10000, 200),
        (lambda samples: max(5000, 100 * samples), 5050, 50),
        (lambda samples: 1000 + 10 * samples, 1005, 0),
        (lambda samples: 1000, 1000, LARGEST),
    ],
)
def test_the_largest_batch_is_found_in_few_looks(
    peak: Callable[[int], int], limit: int, expected: int, start: int
) -> None:
    known = {start: peak(start)}
    assert largest_batch(peak, known, limit) == expected
    assert len(known) <= 14


class Row(IterableDataset[dict[str, torch.Tensor]]):
    """Samples one after the other, from a place that can be kept."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < 64:
            self.place += 1
            yield {"x": torch.randn(64), "labels": torch.tensor(self.place % 10)}
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["list", "iterable"])
def test_a_trainer_estimates_and_trains_as_if_it_had_not(kind: str, tmp_path: Path) -> None:
    def trained(estimates: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, _ = perceptron()
        dataset: Any = Row() if kind == "iterable" else [{"x": torch.randn(64), "labels": 3} for _ in range(64)]
        args = TrainingArguments(
            output_dir=str(tmp_path / str(estimates)), use_cpu=True, max_steps=3, gradient_accumulation_steps=2,
            per_device_train_batch_size=4, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, args, dataset)
        if estimates:
            found = trainer.estimate("1GiB")
            assert found.fits is True
            assert found.device_memory == 2**30
            assert found.anatomy.shape == {"x": [4, 64], "labels": [4]}
            batch = {"x": torch.randn(4, 64), "labels": torch.zeros(4, dtype=torch.long)}
            assert found.anatomy.peak == estimate(model, args, batch).peak
        trainer.train()
        return [parameter.detach() for parameter in model.parameters()]

    for one, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(one, other)


def test_together_is_no_more_than_helps() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))  # has no activation checkpointing
    given: Any = {"device_memory": "1GiB", "compute_loss": lambda model, batch: model(batch).float().sum()}
    found = advise(model, ARGS, torch.randn(4096, 256), **given)
    together = next(option for option in found.options if len(option.changes) > 1 and "optim" in option.changes)
    assert together.changes == {"mixed_precision": "bf16", "optim": "adamw_8bit"}
    assert together.name == "mixed_precision='bf16', optim='adamw_8bit'"
    half = advise(model.bfloat16(), ARGS, torch.randn(64, 256, dtype=torch.bfloat16), **given)  # which needs no copies
    assert not any("mixed_precision" in option.changes for option in half.options)


def test_how_to_tell_the_devices_memory() -> None:
    model, batch = perceptron(8)
    shown = advise(model, ARGS, batch, device="xpu").table()
    assert "give --device-memory, such as 24GiB, or device_memory in Python" in shown

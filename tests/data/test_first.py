"""The first batch, read without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from trainer_kit import Run, SingleDevice, TrainingArguments
from trainer_kit.data.collate import default_collator
from trainer_kit.data.first import first_batch
from trainer_kit.data.loader import Reading


def read(dataset: Any, **given: Any) -> Any:
    args = TrainingArguments(
        use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=5, **given
    )
    run = Run(args, SingleDevice("cpu"), torch.nn.Identity(), train_dataset=dataset)
    return first_batch(run, Reading(default_collator(), args.seed, workers=2))


class Counted(IterableDataset[torch.Tensor]):
    """Numbers, from a place that can be kept."""

    def __init__(self) -> None:
        self.place = 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.place += 1
            yield torch.tensor(self.place) + 0 * torch.randint(9, ())

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def test_one_micro_batch_is_read() -> None:
    asked: list[int] = []

    class Rows:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            asked.append(index)
            return torch.tensor(index)

    assert sorted(read(Rows()).tolist()) == sorted(asked)
    assert len(asked) == 4


def test_a_dataset_with_a_state_and_the_generators_stand_where_they_stood() -> None:
    dataset = Counted()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert read(dataset).tolist() == [4, 5, 6, 7]
    assert dataset.place == 3
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_what_can_be_read_once_is_left_alone() -> None:
    rows = iter([torch.tensor(1)] * 8)
    with pytest.raises(ValueError, match="train_dataset can be read only once"):
        read(rows)
    assert len([*rows]) == 8


def test_there_must_be_a_dataset() -> None:
    with pytest.raises(ValueError, match="needs train_dataset"):
        read(None)

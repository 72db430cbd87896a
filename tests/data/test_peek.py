"""The first batch, read without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer_kit import Run, SingleDevice, TrainingArguments
from trainer_kit.data.collate import default_collator
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.peek import first_batch


def read(dataset: Any, workers: int = 0, **given: Any) -> Any:
    args = TrainingArguments(
        use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=5, **given
    )
    run = Run(args, SingleDevice("cpu"), torch.nn.Identity(), train_dataset=dataset)
    return first_batch(run, LoaderConfig(default_collator(), args.seed, workers)).batch


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


class Rows:
    """A hundred numbers."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_micro_batch_is_read(workers: int) -> None:
    asked = torch.zeros(100).share_memory_()

    class Noted(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            asked[index] += 1
            return super().__getitem__(index)

    assert sorted(read(Noted(), workers).tolist()) == asked.nonzero().flatten().tolist()
    assert asked.sum() == 4


def test_what_a_dataset_keeps_in_itself_stays() -> None:
    class Own(Rows):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(self.generator.random())

    dataset = Own()
    before = dataset.generator.bit_generator.state
    read(dataset)
    assert dataset.generator.bit_generator.state == before


def test_a_file_that_a_dataset_reads_on_from_stays_where_it_was(tmp_path: Path) -> None:
    class Lines(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while byte := file.read(1):
                yield torch.tensor(byte[0])

    (tmp_path / "data").write_bytes(bytes(range(100)))
    with open(tmp_path / "data", "rb", buffering=0) as file:
        assert file.read(3) == b"\0\1\2"
        assert read(Lines()).tolist() == [3, 4, 5, 6]
        assert file.read(1) == b"\3"


@pytest.mark.parametrize("state", [False, True])
def test_what_no_other_process_can_read_is_read_here(state: bool) -> None:
    def only_here() -> None:
        if get_worker_info() is not None:  # as with tensors on a GPU
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    class RowsHere(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            only_here()
            return super().__getitem__(index)

    class CountedHere(Counted):
        def __iter__(self) -> Iterator[torch.Tensor]:
            only_here()
            yield from super().__iter__()

    dataset = CountedHere() if state else RowsHere()
    assert len(read(dataset)) == 4
    if isinstance(dataset, Counted):
        assert dataset.place == 3
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA"):
        read(dataset, workers=1)


@pytest.mark.timeout(60)
def test_a_batch_that_no_worker_could_hand_over_is_read_here() -> None:
    args = TrainingArguments(use_cpu=True, per_device_train_batch_size=4, max_steps=5)
    run = Run(args, SingleDevice("cpu"), torch.nn.Identity(), train_dataset=Rows())
    reading = LoaderConfig(lambda samples: {"x": torch.stack(samples), "own": lambda: 3}, args.seed, 0)
    assert first_batch(run, reading).batch["own"]() == 3


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

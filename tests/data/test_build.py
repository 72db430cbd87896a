from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainer_kit import Trainer
from trainer_kit.checkpoint.format.disk import make_writable_folder
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.build import (
    make_collators,
    make_evaluation_batches,
    make_reading,
    make_train_loader,
    reading_of,
)
from trainer_kit.data.collate import stack
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
from trainer_kit.data.source import data_source
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.device_info import DeviceInfo

READING = LoaderConfig(stack, 0)


def make_run(dataset: Any, **arguments: Any) -> Run:
    return Run(TrainingArguments(**arguments), Strategy(), torch.nn.Linear(1, 1), train_dataset=dataset)


def rows(length: int) -> list[torch.Tensor]:
    return [torch.ones(1)] * length


def test_which_loader_it_is() -> None:
    endless = iter(rows(3))
    assert isinstance(make_train_loader(make_run(rows(3)), READING), TrainLoader)
    assert isinstance(make_train_loader(make_run(endless, max_steps=1), READING), StreamLoader)
    with pytest.raises(ValueError, match="has no length, so that epochs cannot be counted; set max_steps"):
        make_train_loader(make_run(endless), READING)
    with pytest.raises(ValueError, match="group_by_length=True needs a train_dataset with a length"):
        make_train_loader(make_run(endless, max_steps=1, group_by_length=True), READING)
    with pytest.raises(ValueError, match=r"group_by_length=True needs a train_dataset .* shuffled"):
        make_train_loader(make_run(rows(3), group_by_length=True, shuffle=False), READING)
    with pytest.raises(ValueError, match="needs train_dataset"):
        make_train_loader(make_run(None), READING)


@pytest.mark.parametrize("kind", [list, iter])
def test_evaluation_uses_its_own_batch_size(kind: Any) -> None:
    run = make_run(None, per_device_train_batch_size=2, per_device_eval_batch_size=5)
    assert [counts.samples for _, counts, _ in make_evaluation_batches(run, kind(rows(7)), READING)] == [5, 2]


@pytest.mark.parametrize("kind", [list, iter])
def test_a_batch_has_samples_for_each_device(kind: Any) -> None:
    run = make_run(kind(rows(14)), per_device_train_batch_size=2, max_steps=2)
    run.strategy.devices = 3
    loader = make_train_loader(run, READING)
    assert [micro.counts.samples for micro in loader.micro_batches(0, 0, 2)] == [6, 6]
    assert [counts.samples for _, counts, _ in make_evaluation_batches(run, kind(rows(14)), READING)] == [6, 6, 2]


def test_a_halved_evaluation_batch_cuts_those_of_a_loader() -> None:
    batches = BatchSampler(SequentialSampler(range(14)), 7, drop_last=False)
    for loader in (DataLoader(rows(14), batch_size=7), DataLoader(rows(14), batch_sampler=batches)):
        run = make_run(None)
        sizes = [counts.samples for _, counts, _ in make_evaluation_batches(run, loader, READING, 8)]
        assert sizes == [7, 7]
        run.state.eval_batch = 4
        sizes = [counts.samples for _, counts, _ in make_evaluation_batches(run, loader, READING, 4)]
        assert sizes == [4, 3, 4, 3]


def test_a_collator_for_a_loader_is_refused() -> None:
    loader = DataLoader(rows(3))
    with pytest.raises(ValueError, match=r"^data_collator has no effect, since train_dataset is a DataLoader"):
        make_collators(make_run(loader), stack, None, None)
    run = make_run(rows(3))
    run.eval_dataset = loader
    with pytest.raises(ValueError, match=r"^eval_data_collator has no effect, since eval_dataset is a DataLoader"):
        make_collators(run, None, stack, None)


def test_the_arguments_timeout_holds_for_a_loader_without_one() -> None:
    reading = LoaderConfig(stack, 0, timeout=5.0)
    assert reading_of(data_source("train_dataset", DataLoader(rows(3))), reading).timeout == 5.0
    own = DataLoader(rows(3), num_workers=1, timeout=7.0)
    assert reading_of(data_source("train_dataset", own), reading).timeout == 7.0


def test_reading_follows_the_arguments() -> None:
    class PinningInfo(DeviceInfo):
        @property
        def pins_memory(self) -> bool:
            return True

    class Pinning(Strategy):
        def __init__(self) -> None:
            super().__init__()
            self.device_info = PinningInfo(self.device)

    args = TrainingArguments(seed=7, dataloader_num_workers=3)
    assert make_reading(args, Strategy(), stack) == LoaderConfig(stack, 7, 3, pin_memory=False)
    assert make_reading(args, Pinning(), stack).pin_memory
    assert not make_reading(TrainingArguments(dataloader_pin_memory=False), Pinning(), stack).pin_memory


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    assert make_writable_folder(tmp_path / "new" / "folder").is_dir()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"output_dir='.*file' cannot be written"):
        make_writable_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be written"):
        make_writable_folder(tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
@pytest.mark.parametrize("takes_any", [False, True])
def test_labels_get_the_name_that_the_model_has_for_them(tmp_path: Path, name: str, takes_any: bool) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(x), labels)

    class Loose(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, **others: Any) -> torch.Tensor:
            return super().forward(x, labels)

    data = [{"x": torch.randn(2), name: i % 2} for i in range(8)]
    trainer = Trainer(Loose() if takes_any else Net(), arguments(tmp_path, max_steps=1), data)
    assert trainer.train().global_step == 1
    assert trainer.collate(data[:2])["labels"].tolist() == [0, 1]


def test_a_model_with_the_datasets_name_keeps_it(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, label: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            return x.sum()

    trainer = Trainer(Net(), arguments(tmp_path), [])
    assert set(trainer.collate([{"x": 1.0, "label": 1}])) == {"x", "label"}


def test_a_collator_in_the_place_of_the_dataset(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="train_dataset is a function without samples; give a collator by name"):
        Trainer(Linear(), arguments(tmp_path), stack, points())

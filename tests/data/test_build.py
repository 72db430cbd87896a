from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_kit.arguments import TrainingArguments
from trainer_kit.data.build import (
    make_evaluation_batches,
    make_reading,
    make_train_loader,
    total_steps,
    writable_folder,
)
from trainer_kit.data.collate import stack
from trainer_kit.data.loader import Reading, TrainLoader
from trainer_kit.data.stream import StreamLoader
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy

READING = Reading(stack, 0)


def make_run(dataset: Any, **arguments: Any) -> Run:
    return Run(TrainingArguments(**arguments), Strategy(), torch.nn.Linear(1, 1), train_dataset=dataset)


def rows(length: int) -> list[torch.Tensor]:
    return [torch.ones(1)] * length


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_fractions_of_epochs_are_counted_as_written_and_a_resume_changes_nothing(
    tenths: int, length: int, batch_size: int, accumulation: int, drop_last: bool
) -> None:
    length = max(length, batch_size)
    run = make_run(
        rows(length),
        num_train_epochs=tenths / 10,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=drop_last,
    )
    loader, state = make_train_loader(run, READING), run.state
    per_epoch = loader.steps_between(0, loader.epoch_length)
    expected = math.ceil(Fraction(tenths, 10) * per_epoch)
    assert total_steps(run, loader) == expected
    while state.step < expected:  # as the loop counts
        state.step += 1
        state.position = min(state.position + loader.layout.window, loader.epoch_length)
        if state.position == loader.epoch_length:
            state.epoch, state.position = state.epoch + 1, 0
        assert total_steps(run, loader) == expected


def test_another_batch_size_after_a_resume_changes_only_the_steps_left() -> None:
    run = make_run(rows(64), num_train_epochs=2, per_device_train_batch_size=8)
    run.state.step, run.state.position = 8, 32  # with a batch of 4
    assert total_steps(run, make_train_loader(run, READING)) == 8 + 4 + 8


def test_max_steps_comes_first() -> None:
    run = make_run(rows(64), max_steps=3)
    assert total_steps(run, make_train_loader(run, READING)) == 3


def test_more_epochs_than_asked_for_need_no_more_steps() -> None:
    run = make_run(rows(64), num_train_epochs=1)
    run.state.step, run.state.epoch = 24, 3
    assert total_steps(run, make_train_loader(run, READING)) == 24


def test_which_loader_it_is() -> None:
    endless = iter(rows(3))
    assert isinstance(make_train_loader(make_run(rows(3)), READING), TrainLoader)
    assert isinstance(make_train_loader(make_run(endless, max_steps=1), READING), StreamLoader)
    with pytest.raises(ValueError, match="has no length, so that epochs cannot be counted; set max_steps"):
        make_train_loader(make_run(endless), READING)
    with pytest.raises(ValueError, match="group_by_length=True needs a train_dataset with a length"):
        make_train_loader(make_run(endless, max_steps=1, group_by_length=True), READING)
    with pytest.raises(ValueError, match="needs train_dataset"):
        make_train_loader(make_run(None), READING)


@pytest.mark.parametrize("kind", [list, iter])
def test_evaluation_uses_its_own_batch_size(kind: Any) -> None:
    run = make_run(None, per_device_train_batch_size=2, per_device_eval_batch_size=5)
    assert [counts.samples for _, counts in make_evaluation_batches(run, kind(rows(7)), READING)] == [5, 2]


@pytest.mark.parametrize("kind", [list, iter])
def test_a_batch_has_samples_for_each_device(kind: Any) -> None:
    run = make_run(kind(rows(14)), per_device_train_batch_size=2, max_steps=2)
    run.strategy.devices = 3
    loader = make_train_loader(run, READING)
    assert [micro.counts.samples for micro in loader.micro_batches(0, 0, 2)] == [6, 6]
    assert [counts.samples for _, counts in make_evaluation_batches(run, kind(rows(14)), READING)] == [6, 6, 2]


def test_reading_follows_the_arguments() -> None:
    class Pinning(Strategy):
        @property
        def pins_memory(self) -> bool:
            return True

    args = TrainingArguments(seed=7, dataloader_num_workers=3)
    assert make_reading(args, Strategy(), stack) == Reading(stack, 7, 3, pin_memory=False)
    assert make_reading(args, Pinning(), stack).pin_memory
    assert not make_reading(TrainingArguments(dataloader_pin_memory=False), Pinning(), stack).pin_memory


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    assert writable_folder(tmp_path / "new" / "folder").is_dir()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"output_dir='.*file' cannot be written"):
        writable_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be written"):
        writable_folder(tmp_path / "file" / "below")

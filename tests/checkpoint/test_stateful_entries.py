"""Objects in `run.stateful` continue after a resume, whenever they are added before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.breaking import BreaksAt
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Callback, Run, Trainer


class Count:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = int(state_dict["value"])


class Counting(Callback):
    """Adds its object in one of its calls, and counts steps in it."""

    name = "count"

    def __init__(self, call: str, entry: Any = None) -> None:
        self.call, self.entry = call, entry or Count()

    def _add(self, call: str, run: Run) -> None:
        if call == self.call:
            run.stateful[self.name] = self.entry

    def on_init_end(self, run: Run) -> None:
        self._add("on_init_end", run)

    def on_train_begin(self, run: Run) -> None:
        self._add("on_train_begin", run)

    def on_epoch_begin(self, run: Run) -> None:
        self._add("on_epoch_begin", run)

    def on_step_end(self, run: Run) -> None:
        self.entry.value += 1


def train(folder: Path, steps: int, *callbacks: Callback, **options: Any) -> Trainer:
    settings = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4} | options
    args = arguments(folder, max_steps=steps, lr_scheduler_type="constant", **settings)
    trainer = Trainer(Linear(), args, points(8), callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.parametrize("call", ["on_init_end", "on_train_begin"])
def test_it_continues(tmp_path: Path, call: str) -> None:
    train(tmp_path, 2, Counting(call))
    counting = Counting(call)
    train(tmp_path, 6, counting)
    assert counting.entry.value == 6


def test_its_name_may_look_like_that_of_a_file(tmp_path: Path) -> None:
    class Other(Counting):
        name = "faiss.index"

    train(tmp_path, 2, Other("on_init_end"))
    counting = Other("on_init_end")
    train(tmp_path, 4, counting)
    assert counting.entry.value == 4


@pytest.mark.parametrize("callbacks", [[Counting("on_epoch_begin")], []])
def test_one_that_is_added_too_late_or_not_at_all_is_a_warning(tmp_path: Path, callbacks: list[Callback]) -> None:
    train(tmp_path, 2, Counting("on_train_begin"))
    message = r"run.stateful has no 'count', for which .*checkpoint-2 holds a state, .*; add the object before train"
    with pytest.warns(UserWarning, match=message):
        train(tmp_path, 4, *callbacks)


def test_one_without_a_state_is_a_warning(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with pytest.warns(UserWarning, match=r"checkpoint-2 holds nothing for run.stateful\['count'\]; it stays as it is"):
        train(tmp_path, 4, Counting("on_init_end"))


def test_a_rollback_restores_it(tmp_path: Path) -> None:
    counting = Counting("on_train_begin")
    train(tmp_path, 6, counting, BreaksAt(3), nonfinite="rollback", async_save=False)
    assert counting.entry.value == 6  # steps that were taken back do not count


@pytest.mark.parametrize(("entry", "message"), [(object(), "is a object without state_dict"), (None, "does not take")])
def test_one_that_does_not_fit_is_refused(tmp_path: Path, entry: Any, message: str) -> None:
    class Other(Count):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("other")

    train(tmp_path, 2, Counting("on_init_end"))
    with pytest.raises((TypeError, ValueError), match=message):
        train(tmp_path, 4, Counting("on_train_begin", entry or Other()))

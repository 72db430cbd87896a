"""States of the user's own objects in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios.task import Stream, make_trainer


def test_own_objects_are_kept(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.value: Any = 0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    first = make_trainer(tmp_path, max_steps=2)
    first.run.stateful["mine"] = counter = Counter()
    counter.value = {"tensor": torch.arange(3), "list": [1, (2, None)]}
    first.train()
    second = make_trainer(tmp_path, max_steps=3)
    second.run.stateful["mine"] = loaded = Counter()
    second.train(resume_from_checkpoint=True)
    assert torch.equal(loaded.value["tensor"], torch.arange(3))
    assert loaded.value["list"] == [1, (2, None)]


@pytest.mark.parametrize("name", ["optimizer", "trainer"])
def test_own_objects_cannot_take_the_runs_names(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.run.stateful[name] = Stream()
    with pytest.raises(ValueError, match=f"run.stateful\\['{name}'\\]"):
        trainer.train()


def test_an_object_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    class Own:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("b")

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.run.stateful["own"] = Own()
    trainer.train()
    again = make_trainer(tmp_path, max_steps=3)
    again.run.stateful["own"] = Own()
    with pytest.raises(ValueError, match=r"run.stateful\['own'\] does not take the state .*: KeyError: 'b'; resume"):
        again.train(resume_from_checkpoint=True)


def test_own_objects_without_a_state_are_refused_before_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run.stateful["mine"] = object()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"run.stateful\['mine'\] is a object without state_dict"):
        trainer.train()
    assert trainer.run.state.step == 0


def test_a_schedule_without_a_state_is_refused_before_training(tmp_path: Path) -> None:
    class Halving:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] /= 2

    trainer = make_trainer(tmp_path / "saves", max_steps=2)
    trainer.lr_scheduler = Halving
    with pytest.raises(TypeError, match=r"lr_scheduler=Halving has no state_dict\(\), .* or set save_strategy='no'"):
        trainer.train()
    assert trainer.run.state.step == 0
    trainer = make_trainer(tmp_path / "none", max_steps=2, save_strategy="no")
    trainer.lr_scheduler = Halving
    assert trainer.train().global_step == 2


def test_an_optimizer_whose_step_makes_an_object_is_named(tmp_path: Path) -> None:
    class Projecting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for each in self.param_groups[0]["params"]:
                self.state[each]["projector"] = object()

    def trainer_of(folder: str, **changes: Any) -> Any:
        trainer = make_trainer(tmp_path / folder, max_steps=2, **changes)
        trainer.optimizer = Projecting(trainer.run.model.parameters(), lr=0.1)
        return trainer

    sentence = r"the state of Projecting cannot be saved: .*\['projector'\] is of .*, or set save_strategy='no'"
    with pytest.raises(TypeError, match=sentence):
        trainer_of("saves").train()
    assert trainer_of("none", save_strategy="no").train().global_step == 2

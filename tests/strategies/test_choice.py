from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_kit import Precision, SingleDevice, Strategy, TrainingArguments
from trainer_kit.strategies.choice import choose_strategy


def test_use_cpu_takes_the_cpu() -> None:
    strategy = choose_strategy(TrainingArguments(use_cpu=True))
    assert isinstance(strategy, SingleDevice)
    assert strategy.device == torch.device("cpu")


def test_precision_comes_from_the_arguments_unless_the_strategy_has_its_own() -> None:
    args = TrainingArguments(use_cpu=True, mixed_precision="bf16")
    assert choose_strategy(args).precision.mode == "bf16"  # type: ignore[union-attr]
    own = Precision("no")
    assert choose_strategy(args, SingleDevice("cpu", own)).precision is own


def test_a_subclass_of_the_users_own_is_taken() -> None:
    class Mine(Strategy):
        pass

    mine = Mine()
    assert choose_strategy(TrainingArguments(), mine) is mine


@pytest.mark.parametrize("wrong", [SingleDevice, "single", 3])
def test_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="is no Strategy; give an instance"):
        choose_strategy(TrainingArguments(), wrong)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=r"2 processes, .* each would train alone"):
        choose_strategy(TrainingArguments())
    monkeypatch.setenv(name, "1")
    assert choose_strategy(TrainingArguments(use_cpu=True)).world_size == 1

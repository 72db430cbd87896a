from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_kit import Precision, SingleDevice, Strategy, TrainingArguments
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.multinode import MultiNode
from trainer_kit.strategies.select import choose_strategy


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


def started(monkeypatch: pytest.MonkeyPatch, world_size: int, here: int) -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": here}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


def test_the_launchers_processes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 2, 2)
    assert type(choose_strategy(TrainingArguments(use_cpu=True))) is DDP
    started(monkeypatch, 4, 2)
    assert type(choose_strategy(TrainingArguments(use_cpu=True))) is MultiNode
    started(monkeypatch, 1, 1)
    assert type(choose_strategy(TrainingArguments(use_cpu=True))) is SingleDevice


def test_strategies_by_name_work_with_one_process() -> None:
    for name, kind in (("ddp", DDP), ("multinode", MultiNode), ("single", SingleDevice)):
        strategy = choose_strategy(TrainingArguments(use_cpu=True, strategy=name))  # type: ignore[arg-type]
        assert type(strategy) is kind
        assert strategy.world_size == 1


def test_processes_that_would_each_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 2, 2)
    with pytest.raises(ValueError, match=r"2 processes, .* each would train alone"):
        choose_strategy(TrainingArguments(strategy="single"))


def test_ddp_is_for_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, 4, 2)
    with pytest.raises(ValueError, match=r"DDP is for one machine, .* use strategy='auto' or MultiNode"):
        choose_strategy(TrainingArguments(use_cpu=True, strategy="ddp"))

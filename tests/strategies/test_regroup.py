"""Which strategies go on in their processes; tests/loop/test_regrouping.py lets them do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_kit import SingleDevice
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP


def test_a_process_without_others_does_not_regroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_REGROUP_FOLDER", str(tmp_path))
    assert SingleDevice("cpu").regroupable is None
    assert DDP(device="cpu").regroupable is None


@pytest.mark.parametrize("strategy", [DDP, FSDP])
@pytest.mark.parametrize("has_launcher", [True, False])
def test_only_whole_replicas_under_an_elastic_launcher_regroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: type[DDP], has_launcher: bool
) -> None:
    if has_launcher:
        monkeypatch.setenv("TRAINER_KIT_REGROUP_FOLDER", str(tmp_path))
    made = strategy(device="cpu")
    monkeypatch.setattr(type(made.group), "is_own", True)
    assert (made.regroupable is made) == (has_launcher and strategy is DDP)


def test_a_whole_step_of_a_lone_process_is_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has lost all others gives its buffers to those that join."""
    monkeypatch.setenv("TRAINER_KIT_REGROUP_FOLDER", str(tmp_path))
    monkeypatch.setenv("TRAINER_KIT_NEWCOMER", "1")  # it has a replica, as one that has lost others
    strategy = DDP(device="cpu")
    strategy.setup()
    model = torch.nn.BatchNorm1d(4)
    prepared = strategy.prepare(model)
    optimizer = strategy.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    assert strategy.regroupable is strategy
    strategy.expect_regroup(True)
    for _ in range(3):
        strategy.keep_buffers()
        strategy.backward(prepared(torch.randn(8, 4)).square().sum())
        strategy.step(optimizer)
    strategy.restore_buffers()
    assert int(model.num_batches_tracked) == 3
    strategy.keep_buffers()
    prepared(torch.randn(8, 4))
    strategy.restore_buffers()
    assert int(model.num_batches_tracked) == 3

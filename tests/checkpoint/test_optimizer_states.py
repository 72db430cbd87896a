"""Optimizer states in checkpoints: what fits is read, only the own part of it; what does not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.boxes import Reads, cut, rows, rows_of
from scenarios.task import make_trainer

from trainer_kit.checkpoint import take_snapshot, write_checkpoint
from trainer_kit.checkpoint.optimizer_states import read_optimizer_state
from trainer_kit.errors import CheckpointError
from trainer_kit.utils.box import unsharded
from trainer_kit.utils.optimizer_state import GROUPS, optimizer_state


def test_every_optimizer_of_torch_fits_itself(tmp_path: Path) -> None:
    """Whatever it keeps: of a parameter's shape, a row or a column of it, or one number."""
    for number, kind in enumerate(("Adafactor", "ASGD", "NAdam", "Rprop", "RMSprop", "Adagrad")):
        for steps in (2, 3):
            trainer = make_trainer(tmp_path / str(number), max_steps=steps)
            trainer.optimizer = getattr(torch.optim, kind)(trainer.run.model.parameters(), lr=1e-3)
            trainer.train(resume_from_checkpoint=True)
        assert trainer.run.state.step == 3


def test_of_a_sharded_parameters_state_only_its_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (1,), (5, 2, 2))])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = {"optimizer": optimizer_state(optimizer)}
    checkpoint = write_checkpoint(tmp_path, take_snapshot(1, {}, states, arguments={}))
    reads, held = Reads(monkeypatch), 0
    found = read_optimizer_state(checkpoint, "optimizer", optimizer, {}, rows_of(1, 2))
    assert found is not None
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(found["state"][number]["step"], state["step"])
        held += state["step"].nbytes
        for name in ("exp_avg", "exp_avg_sq"):
            box = rows(tuple(state[name].shape), 1, 2)
            assert found["state"][number][name].shape == state[name].shape
            assert torch.equal(cut(found["state"][number][name], box), cut(state[name], box))
            held += cut(state[name], box).nbytes
    assert reads.nbytes == held
    whole = read_optimizer_state(checkpoint, "optimizer", optimizer, {}, unsharded)
    assert whole is not None
    assert same_state(whole["state"], optimizer.state_dict()["state"])


def same_state(left: dict[int, Any], right: dict[int, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[number][name], value) for number, state in right.items() for name, value in state.items()
    )


def test_a_state_that_is_missing_or_damaged(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    state = optimizer_state(optimizer)
    checkpoint = write_checkpoint(
        tmp_path, take_snapshot(1, {}, {"optimizer": {**state, GROUPS: [{"rates": {}}]}}, arguments={})
    )
    assert read_optimizer_state(checkpoint, "optimizer_1", optimizer, {}, unsharded) is None
    with pytest.raises(CheckpointError, match="is damaged: the optimizer's state does not describe its parameters"):
        read_optimizer_state(checkpoint, "optimizer", optimizer, {}, unsharded)

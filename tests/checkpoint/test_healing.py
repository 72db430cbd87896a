"""The newest whole state of any process goes to those behind; tests/loop/test_regrouping.py heals trainings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks, try_on_ranks
from kit.trainer import arguments
from kit.valued import Valued
from scenarios import task

from trainer_kit import Callback, Run, Trainer
from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint.healing import Progress, heal
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.ddp import DDP


class Heals(Callback):
    """Makes the ranks differ after step 2, as a loss may leave them, and heals them."""

    def __init__(self, progress: list[Progress]) -> None:
        self.progress = progress
        self.result: Any = None

    def on_step_end(self, run: Run) -> None:
        if run.state.step != 2:
            return
        rank = run.strategy.rank
        for tensor in run.model.state_dict().values():
            tensor.fill_(rank)
        assert run.optimizer is not None
        for state in run.optimizer.state.values():
            state["exp_avg"].fill_(rank)
        run.state.samples = 100 + rank
        run.stateful["own"] = Own(rank)
        last = list(run.model.parameters())[-1].requires_grad_(rank % 2 == 1)
        checkpoints = CheckpointManager(run, CallbackList([]))
        checkpoints.lay_out(trainer_loader(run))
        checkpoints.data_state = {"rank": rank}
        healed = heal(checkpoints, run.strategy, self.progress[rank], f"of rank {rank}")
        values = {float(value.float().mean()) for value in run.model.state_dict().values()}
        moments = {float(state["exp_avg"].mean()) for state in run.optimizer.state.values()}
        own, data = run.stateful["own"].state_dict()["value"], checkpoints.data_state
        assert healed.joined == any(each.step < 0 for each in self.progress)
        self.result = (
            healed.taken, healed.extra, values, moments, run.state.samples - 100, own, data, last.requires_grad
        )  # fmt: skip


class Own:
    """A stateful object of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def trainer_loader(run: Run) -> Any:
    from trainer_kit.data.build import make_reading, make_train_loader

    return make_train_loader(run, make_reading(run.args, run.strategy, torch.utils.data.default_collate))


def heal_ranks(folder: str, progress: list[Progress]) -> Any:
    heals = Heals(progress)
    torch.manual_seed(0)
    given = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 2}
    with warnings.catch_warnings():  # those that are as far keep what they have, which differs here
        warnings.filterwarnings("ignore", "the processes train different weights")
        task.make_trainer(Path(folder), heals, strategy=DDP(device="cpu"), **given).train()
    return heals.result


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("progress", "source"),
    [
        ([Progress(4, 7, True), Progress(5, 7, True), Progress(4, 7, True)], 1),
        ([Progress(4, 7, False), Progress(4, 7, True), Progress(4, 8, True)], 2),
        ([Progress(4, 7, True), Progress(4, 8, True), Progress(5, 0, False)], 0),
        ([Progress(5, 7, True), Progress(5, 7, True), Progress(4, 7, True)], 0),
        ([Progress(5, 7, True), Progress(5, 7, True), Progress(-1, 0, False)], 0),
    ],
    ids=["a later step", "a later request", "the main process", "the first of several", "for one that joins"],
)
def test_the_newest_whole_state_wins(tmp_path: Path, progress: list[Progress], source: int) -> None:
    results = on_ranks(3, heal_ranks, str(tmp_path), progress)
    for rank, result in enumerate(results):
        is_behind = progress[rank] != progress[source]
        kept = source if is_behind else rank
        # The weights of all are the source's.
        assert result == (
            is_behind, f"of rank {kept}", {float(source)}, {float(kept)}, kept, kept, {"rank": kept}, kept % 2 == 1
        )  # fmt: skip


@pytest.mark.distributed
def test_no_whole_state_is_an_error(tmp_path: Path) -> None:
    for result in try_on_ranks(2, heal_ranks, str(tmp_path), [Progress(4, 0, False)] * 2):
        assert "no process has a whole state" in str(result.error), result
        assert isinstance(result.error.__cause__ or result.error, (LostProcessError, RuntimeError))


class HealsValues(Callback):
    """Makes what the model keeps outside of its tensors differ after step 1, and heals it."""

    def on_step_end(self, run: Run) -> None:
        assert isinstance(run.model, Valued)
        run.model.counter.passes = 10 + run.strategy.rank
        checkpoints = CheckpointManager(run, CallbackList([]))
        checkpoints.lay_out(trainer_loader(run))
        heal(checkpoints, run.strategy, Progress(4 + run.strategy.rank, 0, True))


def heal_values(folder: str) -> int:
    model = Valued()
    rows = [{"x": torch.ones(3)} for _ in range(4)]
    trainer = Trainer(
        model, arguments(Path(folder), max_steps=1), rows, callbacks=[HealsValues()], strategy=DDP(device="cpu"),
        compute_loss=lambda model, batch: model(batch["x"]).square().mean(),
    )  # fmt: skip
    trainer.train()
    return model.counter.passes


@pytest.mark.distributed
def test_values_that_are_no_tensors_are_taken_too(tmp_path: Path) -> None:
    assert on_ranks(2, heal_values, str(tmp_path)) == [11, 11]

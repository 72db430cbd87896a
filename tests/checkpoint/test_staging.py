"""Copies of the state on the host, from which a checkpoint is written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.saves import Watch, names
from scenarios.task import make_trainer

from trainer_kit import Callback, Run, SaveError, SingleDevice
from trainer_kit.checkpoint import load_tensors
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.strategies.device_info import DeviceInfo


def test_the_copy_of_the_state_is_made_in_the_same_memory_again(tmp_path: Path) -> None:
    places: list[set[int]] = []

    class Look(Callback):
        def on_save(self, run: Run, directory: Path) -> None:
            places.append({buffer.data_ptr() for buffer in trainer._loop.checkpoints.saver.copies._places})

    trainer = make_trainer(tmp_path, Look())
    trainer.train()
    assert len(places) == 6
    assert all(each == places[0] for each in places)
    live = {value.data_ptr() for value in trainer.run.model.state_dict().values()}
    assert not live & places[0]


def test_abandoned_copies_hold_up_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    staging = HostStaging(trainer.run)
    staging.take([*trainer.run.model.state_dict().values()])
    assert staging.is_under_way
    staging.abandon()
    assert not staging.is_under_way
    staging.wait()
    staging.complete()  # of a thread that comes too late


class Slow(SingleDevice):
    """Copies are under way until they are let go."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.device_info: SlowCopies = SlowCopies(self.device)


class SlowCopies(DeviceInfo):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.go = threading.Event()
        self.sizes: list[tuple[bool, int]] = []

    def copy_to_host(self, tensors: Any, places: Any, moment: Any = None) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        self.sizes.append((beside, sum(tensor.nbytes for tensor in tensors)))
        if beside:
            assert self.go.wait(60)
        super().copy_to_host(tensors, places, moment)


class LetGo(Callback):
    """Lets copies go on a while after the begin of the step after the save."""

    def __init__(self, strategy: Slow) -> None:
        self.strategy = strategy

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 4:
            threading.Timer(0.3, self.strategy.device_info.go.set).start()


def test_what_the_optimizer_keeps_is_copied_during_the_next_forward_and_backward(tmp_path: Path) -> None:
    states: dict[int, dict[str, torch.Tensor]] = {}

    class State(Callback):
        def on_step_end(self, run: Run) -> None:
            assert run.optimizer is not None
            kept = run.optimizer.state_dict()["state"]
            states[run.state.step] = {
                f"state.{number}.{name}": value.clone() for number in kept for name, value in kept[number].items()
            }

    strategy, watch = Slow(), Watch()
    trainer = make_trainer(tmp_path, watch, State(), LetGo(strategy), strategy=strategy, save_total_limit=None)
    trainer.train()
    for step in (4, 8):
        saved = load_tensors(tmp_path / f"checkpoint-{step}")
        assert all(torch.equal(saved[name], value) for name, value in watch.weights[step].items()), step
        saved = load_tensors(tmp_path / f"checkpoint-{step}" / "state", "optimizer")
        assert saved.keys() == states[step].keys()
        assert all(torch.equal(saved[name], value) for name, value in states[step].items()), step
    beside = [size for is_beside, size in strategy.device_info.sizes if is_beside]
    assert beside == [sum(value.nbytes for value in states[4].values())] * 6
    assert trainer.run.ledger.seconds()["saving"] > 0.2  # it did wait before the optimizer's step


class Renormed(torch.nn.Module):
    """Its forward pass writes to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 4, max_norm=0.1)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.head.bias.data.clamp_(-0.01, 0.01)
        return {"loss": (self.head(x) - self.embedding(labels)).square().mean()}


def test_a_forward_pass_may_write_to_weights(tmp_path: Path) -> None:
    strategy, watch = Slow(), Watch()
    trainer = make_trainer(
        tmp_path, watch, LetGo(strategy), model=Renormed(), strategy=strategy, save_total_limit=None, eval_strategy="no"
    )
    trainer.train()
    assert names(tmp_path) == [f"checkpoint-{step}" for step in range(4, 25, 4)]
    for step in range(4, 25, 4):
        saved = load_tensors(tmp_path / f"checkpoint-{step}")
        assert all(torch.equal(saved[name], value) for name, value in watch.weights[step].items()), step


def test_a_copy_of_an_optimizer_that_was_written_to_is_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changes(Callback):
        def on_step_begin(self, run: Run) -> None:
            if run.state.step == 4:
                assert run.optimizer is not None
                for state in run.optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
                strategy.device_info.go.set()

    strategy = Slow()
    make_trainer(tmp_path, Changes(), strategy=strategy, save_total_limit=None).train()
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (8, 12, 16, 20, 24)]
    assert "the optimizer's state was written to while it was copied" in caplog.text


def test_no_memory_for_the_copy_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(DeviceInfo, "host_memory", refuse)
    with pytest.raises(SaveError, match=r"no host memory for a copy of the state \(.*\); set async_save=False"):
        make_trainer(tmp_path, max_steps=4).train()

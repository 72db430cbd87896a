"""Test checkpoints that several processes write together."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from safetensors import safe_open
from torch import nn

from trainer_kit import Callback, Run, SaveError, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA
from trainer_kit.checkpoint import contribution, find_checkpoints, load_tensors, read_state, verify
from trainer_kit.checkpoint.format import ownership
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.process_session import ProcessSession

STEPS = 6
Damage = Callable[[pytest.MonkeyPatch, int], None]


class Net(nn.Module):
    """A model with tied weights, a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(torch.tanh(self.hidden(self.norm(self.embedding(x))))))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


class Sharded(FSDP):
    """Each process holds a part of the network."""

    def __init__(self, **options: Any) -> None:
        super().__init__(units=["hidden"], **options)


SAMPLES = [{"x": torch.tensor(number % 12), "labels": torch.tensor((5 * number) % 12)} for number in range(48)]


def train(
    folder: str,
    steps: int = STEPS,
    part_bytes: int = 64,
    damage: Damage | None = None,
    callbacks: Sequence[Callback] = (),
    kind: type[DDP] = DDP,
    **arguments: Any,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train on the processes of this run; return the weights and the warnings of this process."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer_kit").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ownership, "PART_BYTES", part_bytes)
            strategy = kind(device="cpu", heartbeat_timeout=4.0)
            if damage is not None:
                damage(patch, strategy.rank)
            given = {
                "save_steps": 2,
                "lr_scheduler_type": "constant",
                "save_total_limit": None,
                "report_to": [],
                "log_level": "warning",
                **arguments,
            }
            args = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=2, **given)
            trainer = Trainer(Net(), args, SAMPLES, strategy=strategy, callbacks=[*callbacks])
            trainer.train(resume_from_checkpoint=True)
    finally:
        logging.getLogger("trainer_kit").removeHandler(handler)
    whole = strategy.sharding.whole_tensors(trainer.run.model.state_dict())
    return {name: tensor.clone() for name, tensor in whole.items()}, records


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.distributed
@pytest.mark.parametrize("async_save", [True, False])
def test_the_processes_write_together_what_one_writes(tmp_path: Path, async_save: bool) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    first = on_ranks(3, train, str(together), async_save=async_save)
    second = on_ranks(3, train, str(alone), part_bytes=2**25, async_save=async_save)
    assert equal(first[0][0], second[0][0])
    for step in (2, 4, 6):
        one, other = together / f"checkpoint-{step}", alone / f"checkpoint-{step}"
        verify(one)
        assert files(one) == [
            *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
            *(f"state/optimizer-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        ]
        assert files(other) == ["model.safetensors", "state/optimizer.safetensors"]
        assert equal(load_tensors(one), load_tensors(other))
        assert equal(read_state(one, "optimizer"), read_state(other, "optimizer"))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [DDP, Sharded])
def test_a_checkpoint_holds_safetensors_and_json_alone(tmp_path: Path, kind: type[DDP]) -> None:
    on_ranks(2, train, str(tmp_path), steps=2, kind=kind)
    written = [path for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()]
    assert {path.suffix for path in written} == {".safetensors", ".json"}
    names = set()
    for path in written:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt") as opened:
                names.update(opened.keys())
    assert {*Net().state_dict()} - {"head.weight"} <= names  # it is tied


@pytest.mark.distributed
def test_any_layout_resumes_it_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (straight, _), _ = on_ranks(2, train, str(tmp_path / "straight"), steps=4)
    on_ranks(2, train, str(tmp_path / "run"), steps=2)
    on_ranks(2, train, str(tmp_path / "run"), steps=4)
    assert equal(load_tensors(tmp_path / "run" / "checkpoint-4"), load_tensors(tmp_path / "straight" / "checkpoint-4"))
    weights, _ = train(str(tmp_path / "run"), steps=4)
    assert equal(weights, straight)


def _full_on(rank: int, step: int) -> Damage:
    def damage(patch: pytest.MonkeyPatch, own: int) -> None:
        write = contribution.write_part

        def full(staging: Path, *args: Any) -> Any:
            if f"checkpoint-{step}-" in staging.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
            return write(staging, *args)

        if own == rank:
            patch.setattr(contribution, "write_part", full)

    return damage


def train_with_a_full_disk(folder: str, async_save: bool, kind: type[DDP]) -> Any:
    return train(folder, damage=_full_on(2, 4), async_save=async_save, kind=kind)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [DDP, Sharded])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_of_one_process_is_a_warning_that_names_it(
    tmp_path: Path, async_save: bool, kind: type[DDP]
) -> None:
    results = on_ranks(3, train_with_a_full_disk, str(tmp_path), async_save, kind)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-6"]
    [warning] = [record for record in results[0][1] if "could not be written" in record]
    assert "the checkpoint of step 4 could not be written: rank 2: [Errno 28] No space left on device" in warning
    assert not list(tmp_path.glob(".staging-*"))


def train_with_trouble_on_one(folder: str, error: type[Exception], text: str) -> Any:
    def damage(patch: pytest.MonkeyPatch, rank: int) -> None:
        def fail(self: Any, tensors: Any) -> Any:
            raise error(text)

        if rank == 1:
            patch.setattr("trainer_kit.checkpoint.staging.HostStaging.take", fail)

    return train(folder, damage=damage, steps=3, save_failures="warn")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("error", "text", "sentence"),
    [
        (OSError, "no host memory for a copy", "rank 1: no host memory for a copy"),
        (RuntimeError, "CUDA error", "rank 1: RuntimeError: CUDA error"),
    ],
)
def test_whatever_one_process_fails_with_fails_the_save_of_all(
    tmp_path: Path, error: type[Exception], text: str, sentence: str
) -> None:
    results = try_on_ranks(2, train_with_trouble_on_one, str(tmp_path), error, text)
    assert find_checkpoints(tmp_path) == []
    assert not list(tmp_path.glob(".staging-*"))
    for result in results:  # the last save is tried again, and its failure ends the run
        assert isinstance(result, RankFailed)
        assert isinstance(result.error, SaveError)
        assert sentence in str(result.error)


def train_until_signalled(folder: str, number: signal.Signals, kind: type[DDP]) -> Any:
    def damage(patch: pytest.MonkeyPatch, rank: int) -> None:
        write = contribution.write_part

        def signalled(staging: Path, *args: Any) -> Any:
            if "checkpoint-4-" in staging.name:
                os.kill(os.getpid(), number)
                time.sleep(1)  # this thread may run on until the signal has reached the process
            return write(staging, *args)

        if rank == 1:
            patch.setattr(contribution, "write_part", signalled)

    return train(folder, damage=damage, kind=kind)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [DDP, Sharded])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_lost_in_its_part_costs_no_older_checkpoint(
    tmp_path: Path, number: signal.Signals, kind: type[DDP]
) -> None:
    """With FSDP, the other process waits for parts of tensors meanwhile."""
    straight = on_ranks(2, train, str(tmp_path / "straight"), kind=kind)
    with pytest.raises(AssertionError):
        on_ranks(2, train_until_signalled, str(tmp_path / "run"), number, kind)
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    again = on_ranks(2, train, str(tmp_path / "run"), kind=kind)
    assert equal(again[0][0], straight[0][0])


class FailAt(Callback):
    """Raises on one rank while the checkpoint of step 4 is written, which it lets go on then."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.has_failed = threading.Event()

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 5 and run.strategy.rank == self.rank:
            self.has_failed.set()
            raise ArithmeticError("told to fail")


def train_with_an_error_on_one(folder: str, failing: int, kind: type[DDP]) -> Any:
    callback = FailAt(failing)

    def damage(patch: pytest.MonkeyPatch, rank: int) -> None:
        write = contribution.write_part

        def slow(staging: Path, *args: Any) -> Any:
            if "checkpoint-4-" in staging.name and rank == failing:
                callback.has_failed.wait(60)
            return write(staging, *args)

        patch.setattr(contribution, "write_part", slow)

    return train(folder, damage=damage, callbacks=[callback], kind=kind)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [DDP, Sharded])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_process_waits_for_its_part(tmp_path: Path, failing: int, kind: type[DDP]) -> None:
    straight = on_ranks(2, train, str(tmp_path / "straight"), kind=kind)
    with pytest.raises(AssertionError):
        on_ranks(2, train_with_an_error_on_one, str(tmp_path / "run"), failing, kind)
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["checkpoint-2", "checkpoint-4"]
    verify(tmp_path / "run" / "checkpoint-4")
    again = on_ranks(2, train, str(tmp_path / "run"), kind=kind)
    assert equal(again[0][0], straight[0][0])


def train_with_states_that_differ(folder: str, how: str) -> Any:
    def damage(patch: pytest.MonkeyPatch, rank: int) -> None:
        state_of = DDP.optimizer_state

        def other(self: DDP, optimizer: Any) -> dict[str, Any]:
            state = state_of(self, optimizer)
            if how == "raises":
                raise ValueError("no state here")
            if how == "lacks":
                return {}
            first = {**state["state"][0], "exp_avg": state["state"][0]["exp_avg"].double()}
            return {**state, "state": {**state["state"], 0: first}}

        if rank == 1:
            patch.setattr(DDP, "optimizer_state", other)

    return train(folder, damage=damage, steps=4)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "cannot give its state (ValueError: no state here)"),
        ("lacks", "has other tensors in its model or optimizer"),
        ("dtype", "has other tensors in its model or optimizer"),
    ],
)
def test_where_states_differ_the_main_process_writes_alone(tmp_path: Path, how: str, why: str) -> None:
    (_, records), _ = on_ranks(2, train_with_states_that_differ, str(tmp_path), how)
    assert records == [f"the main process writes all checkpoints alone, since rank 1 {why}"]
    for step in (2, 4):
        verify(tmp_path / f"checkpoint-{step}")
        assert files(tmp_path / f"checkpoint-{step}") == ["model.safetensors", "state/optimizer.safetensors"]
    weights, _ = train(str(tmp_path), steps=4)
    assert equal(weights, load_tensors(tmp_path / "checkpoint-4"))


def writers_where_one_does_not_see_the_folder(folder: str) -> list[int]:
    found: list[int] = []
    restore = CheckpointManager.restore

    def seen(self: CheckpointManager) -> None:
        restore(self)
        found.extend(self.saver.writers.ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointManager, "restore", seen)
        find = ProcessSession.find_writers
        patch.setattr(ProcessSession, "find_writers", lambda self, folder: [find(self, folder)[0], 2])
        train(folder)
    return found


@pytest.mark.distributed
def test_only_processes_that_see_the_folder_write(tmp_path: Path) -> None:
    assert on_ranks(3, writers_where_one_does_not_see_the_folder, str(tmp_path)) == [[0, 2]] * 3
    verify(tmp_path / "checkpoint-6")
    assert len(files(tmp_path / "checkpoint-6")) == 4


class CountedOnMain(Callback):
    """Keeps tensors that only the main process changes, more of them with each step."""

    def __init__(self) -> None:
        self.counts = [torch.zeros(100), torch.zeros(100)]

    def on_step_end(self, run: Run) -> None:
        if run.strategy.is_main:
            self.counts = [*(each + 1 for each in self.counts), torch.full((3,), float(run.state.step))]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}


def train_with_counts_and_averages(folder: str) -> Any:
    return train(folder, steps=4, kind=Sharded, callbacks=[CountedOnMain(), EMA(decay=0.5)])


@pytest.mark.distributed
def test_the_main_process_counts_for_what_is_not_sharded(tmp_path: Path) -> None:
    """Also in a state that has sharded tensors, as the callbacks' with an EMA."""
    (_, records), (_, others) = on_ranks(2, train_with_counts_and_averages, str(tmp_path))
    assert not [text for text in (*records, *others) if "checkpoint" in text]
    for step in (2, 4):
        verify(tmp_path / f"checkpoint-{step}")
        states = (read_state(tmp_path / f"checkpoint-{step}", "callbacks") or {}).values()
        counts = next(state["counts"] for state in states if "counts" in state)
        assert [each.tolist() for each in counts[:2]] == [[float(step)] * 100] * 2
        assert [each.tolist() for each in counts[2:]] == [[float(step)] * 3] * step


class Halve(Callback):
    """Changes the optimizer's state while it is copied."""

    def on_step_begin(self, run: Run) -> None:
        assert run.optimizer is not None
        for state in run.optimizer.state.values():
            state["exp_avg"].mul_(0.5)


def train_and_change_the_state(folder: str, kind: type[DDP]) -> Any:
    def damage(patch: pytest.MonkeyPatch, rank: int) -> None:
        complete = HostStaging.complete

        def slow(self: HostStaging) -> None:
            threading.Event().wait(0.3)
            complete(self)

        patch.setattr(HostStaging, "complete", slow)

    return train(folder, steps=3, damage=damage, callbacks=[Halve()], kind=kind)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [DDP, Sharded])
def test_a_state_that_changes_while_it_is_copied_fails_the_save(tmp_path: Path, kind: type[DDP]) -> None:
    (_, records), _ = on_ranks(2, train_and_change_the_state, str(tmp_path), kind)
    [warning] = [text for text in records if "could not be written" in text]
    assert "the optimizer's state was written to while it was copied" in warning
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-3"]

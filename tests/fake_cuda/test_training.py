"""Whole trainings on a simulated GPU, and faults of a training that it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fake_cuda import Gpus, fake_cuda
from torch import nn

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.checkpoint.async_saver import AsyncSaver
from trainer_kit.errors import DataError
from trainer_kit.strategies import single
from trainer_kit.strategies.cuda_info import CudaInfo
from trainer_kit.strategies.device_info import DeviceInfo


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def points(length: int = 48, *bad: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(index % 3)} for index in range(length)]
    for index in bad:
        rows[index]["x"].fill_(torch.inf)
    return rows


def make(
    folder: Path, *callbacks: Callback, data: Any = None, model: nn.Module | None = None, **changes: Any
) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 8, "learning_rate": 0.05, "per_device_train_batch_size": 4,
        "logging_steps": 3, "report_to": "none", "disable_tqdm": True, "log_level": "error", "save_strategy": "no",
    }  # fmt: skip
    args = TrainingArguments(**(values | changes))
    return Trainer(model or Classifier(), args, data or points(), points(12), callbacks=callbacks)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the model's and the optimizer's tensors on the host."""
    run = trainer.run
    assert run.optimizer is not None
    states = [run.optimizer.state[parameter] for parameter in run.model.parameters()]
    moments = {f"{name} {number}": value for number, state in enumerate(states) for name, value in state.items()}
    return {name: value.detach().cpu().clone() for name, value in (run.model.state_dict() | moments).items()}


def are_equal(one: Trainer, other: Trainer) -> bool:
    first, second = state_of(one), state_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None}

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "workers": {"dataloader_num_workers": 1},
    "saves": SAVES,
    "saves in the loop": SAVES | {"async_save": False},
    "fp16 and saves": SAVES | {"mixed_precision": "fp16", "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_training(gpus: Gpus, tmp_path: Path, way: str) -> None:
    trainer = make(tmp_path, **WAYS[way])
    metrics = trainer.train().metrics
    assert trainer.run.state.step == 8
    assert {tensor.device.type for tensor in trainer.run.model.state_dict().values()} == {"cuda"}
    assert trainer.run.strategy.scales_gradients is ("fp16" in way)
    assert 0 < metrics["memory_gib"] <= metrics["peak_memory_gib"] < 1e-3
    assert metrics["train_loss"] > 0
    assert all(file.is_file() for file in tmp_path.glob("checkpoint-*/manifest.json"))
    assert len([*tmp_path.glob("checkpoint-*/manifest.json")]) == (4 if "saves" in way else 0)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        run.requests.stop = run.requests.stop or run.state.step == self.step


@pytest.mark.parametrize("mode", ["no", "fp16", "bf16"])
def test_a_resumed_training_has_the_same_bits(gpus: Gpus, tmp_path: Path, mode: str) -> None:
    whole = make(tmp_path / "whole", mixed_precision=mode)
    whole.train()
    options = SAVES | {"save_steps": 4, "mixed_precision": mode}
    make(tmp_path / "parts", StopAt(5), **options).train()
    resumed = make(tmp_path / "parts", **options)
    torch.cuda.manual_seed_all(99)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run.state.step == 8
    assert are_equal(resumed, whole)


def test_a_rollback_goes_back_to_the_checkpoint(gpus: Gpus, tmp_path: Path) -> None:
    class Rollbacks(Callback):
        seen = 0

        def on_rollback(self, run: Run, directory: Path) -> None:
            self.seen += 1

    rollbacks = Rollbacks()
    trainer = make(
        tmp_path, rollbacks, data=points(48, 7), nonfinite="rollback", logging_steps=1, **SAVES, num_train_epochs=1
    )
    trainer.train()
    assert rollbacks.seen == 1
    assert all(tensor.isfinite().all() for tensor in state_of(trainer).values())


class Layers(nn.Module):
    """Linear layers whose sizes are far from powers of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 70), *(nn.Linear(70, 70) for _ in range(12)), nn.Linear(70, 3))

    forward = Classifier.forward


class PinnedMemory(Callback):
    """What the first save pins."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self.held: list[int] = []
        self.blocks: list[int] = []

    def on_save(self, run: Run, directory: Path) -> None:
        self.held.append(self.gpus.pinned.held)
        self.blocks.append(self.gpus.pinned.blocks)


def test_copies_of_the_state_take_little_page_locked_memory(gpus: Gpus, tmp_path: Path) -> None:
    """A tensor alone takes a power of two: 1.7 times this state, in 145 blocks."""
    pinned = PinnedMemory(gpus)
    trainer = make(tmp_path, pinned, model=Layers(), **SAVES)
    trainer.train()
    state = sum(tensor.nbytes for tensor in state_of(trainer).values())
    assert len(pinned.held) == 4
    assert state < pinned.held[0] < 1.1 * state
    assert pinned.held[-1] == pinned.held[0]  # used again
    assert pinned.blocks[0] < 20  # batches are pinned too
    assert gpus.pinned.held == 0  # given back at the end


class Wide(Classifier):
    """Keeps 4 KiB a sample for the backward pass."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + (x.repeat(1, 256).exp().sin() * 0).sum(1, keepdim=True), labels)


class Ballast(Callback):
    """Takes memory away after a step."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2:
            self.held = torch.empty(90_000, dtype=torch.uint8, device=run.strategy.device)


def test_a_step_that_does_not_fit_is_repeated(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with fake_cuda(memory=170_000) as gpus:
        options = {"per_device_train_batch_size": 16, "auto_find_batch_size": True, "log_level": "warning"}
        trainer = make(tmp_path, Ballast(), model=Wide(), **options)
        trainer.train()
        assert trainer.run.state.samples == 8 * 16
        assert trainer.run.state.micro_batch == 4
    assert gpus.races == []
    assert "step 3 did not fit into memory with 8 samples at once (CUDA out of memory" in caplog.text


@pytest.mark.slow
def test_a_profile_is_written(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", marks.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("end"))
    make(tmp_path / "without", max_steps=4).train()
    assert marks == []
    make(tmp_path, profile="2:3", max_steps=4).train()
    assert {path.suffix for path in (tmp_path / "profile").glob("*")} == {".json", ".txt", ".pickle"}
    steps = [mark for mark in marks if mark.startswith("ProfilerStep")]
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"]
    assert all(marks.count(name) >= 2 for name in ("forward", "backward", "optimizer"))
    depth = 0
    for mark in marks:
        depth += -1 if mark == "end" else 1
        assert 0 <= depth <= 2
    assert depth == 0


class Damaged(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 30:
            raise OSError("sample 30")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_ends_its_own_step(gpus: Gpus, tmp_path: Path) -> None:
    steps = []
    for use_cpu in (False, True):
        trainer = make(tmp_path / str(use_cpu), data=Damaged(points()), use_cpu=use_cpu, max_steps=12)
        with pytest.raises(DataError, match="sample 30"):
            trainer.train()
        steps.append(trainer.run.state.step)
    assert steps[0] == steps[1] > 0


# Faults


def without_event(self: DeviceInfo, tensors: Any, places: Any, moment: Any = None) -> None:
    """A copy of the state that does not come after the optimizer's step."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch._foreach_copy_([*places], [each.detach() for each in tensors], non_blocking=True)
    side.synchronize()


def without_wait(self: DeviceInfo, tensors: Any, places: Any, moment: Any = None) -> None:
    """A copy that is read before it is there."""
    torch._foreach_copy_([*places], [each.detach() for each in tensors], non_blocking=True)


@pytest.mark.parametrize("copy", [DeviceInfo.copy_to_host, without_event, without_wait])
@pytest.mark.parametrize("has_event", [False, True])
def test_a_copy_of_the_state_comes_after_the_step_and_before_the_write(copy: Any, has_event: bool) -> None:
    with fake_cuda() as gpus:
        info = CudaInfo(torch.device("cuda", 0))
        state = torch.full((3,), 1.0, device="cuda").mul_(2)
        places = info.host_memory([state])
        copy(info, [state], places, info.record_event() if has_event else None)
        places[0].tolist()
    assert bool(gpus.races) is (copy is not DeviceInfo.copy_to_host)


def without_record(batch: Any, stream: torch.cuda.Stream) -> None:
    """A batch whose memory is given to the next one while a step may still read it."""
    torch.cuda.current_stream().wait_stream(stream)


def without_order(batch: Any, stream: torch.cuda.Stream) -> None:
    """A batch that a step reads before it is there."""
    for tensor in batch.values():
        tensor.record_stream(torch.cuda.current_stream())


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a checkpoint that is written before it is copied": (
        DeviceInfo,
        "copy_to_host",
        without_wait,
        "read after a write",
    ),
    "a step that does not wait for the copy": (AsyncSaver, "wait_for_staging", lambda self: None, "after a"),
    "a batch that is freed too early": (single, "_hand_over", without_record, "freed"),
    "a batch that is read too early": (single, "_hand_over", without_order, "read after a write"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_races_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    owner, name, function, race = FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    with fake_cuda() as gpus:
        make(tmp_path, **SAVES).train()
    assert any(race in each.what for each in gpus.races)


def test_a_batch_on_the_host_is_found(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(single.SingleDevice, "prepare_loader", lambda self, batches: iter(batches))
    monkeypatch.setattr(single.SingleDevice, "to_device", lambda self, batch: batch)
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
        make(tmp_path).train()


def test_a_generator_that_is_not_seeded_is_found(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    monkeypatch.setattr(single.SingleDevice, "seed", lambda self, value: super(single.SingleDevice, self).seed(value))
    again = make(tmp_path / "again")
    again.train()
    assert not are_equal(again, whole)

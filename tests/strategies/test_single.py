from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.sync_debug import SyncDebug
from torch import nn

from trainer_kit import Callback, Run, SingleDevice, Trainer, TrainingArguments
from trainer_kit.strategies import choose_strategy
from trainer_kit.strategies.precision import Precision


def needs_cuda(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.usefixtures("cuda")(test))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def points(length: int = 50) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(index % 3)} for index in range(length)]


def arguments(tmp_path: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 20, "learning_rate": 0.01, "logging_steps": 5, "log_level": "error",
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**(values | changes))


def test_the_cpu_can_be_asked_for() -> None:
    strategy = SingleDevice("cpu")
    strategy.setup()
    assert strategy.device == torch.device("cpu")
    assert isinstance(strategy.precision, Precision)
    assert strategy.precision.mode == "no"
    assert not strategy.device_info.pins_memory
    assert not strategy.scales_gradients
    assert set(strategy.device_info.memory()) == {"memory_gib", "peak_memory_gib"}
    batches = [SimpleNamespace(batch=torch.ones(1))]
    assert list(strategy.prepare_loader(batches)) == batches


@pytest.mark.parametrize(("cuda", "mps", "expected"), [(False, True, "mps"), (False, False, "cpu")])
def test_the_best_device_is_taken(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert SingleDevice().device.type == expected


def test_cuda_comes_first_and_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert SingleDevice().device == SingleDevice("cuda").device == torch.device("cuda", 1)
    assert SingleDevice("cuda:0").device == torch.device("cuda", 0)
    assert SingleDevice("cuda:0").device_info.pins_memory


def test_the_choice_follows_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    chosen = choose_strategy(TrainingArguments(use_cpu=True, mixed_precision="bf16"))
    assert isinstance(chosen, SingleDevice)
    assert chosen.device.type == "cpu"
    assert chosen.precision is not None
    assert chosen.precision.mode == "bf16"
    own = SingleDevice("cpu", Precision("no"))
    assert choose_strategy(TrainingArguments(mixed_precision="bf16"), own) is own
    assert own.precision is not None
    assert own.precision.mode == "no"  # the user's own word comes first
    wrong: Any = SingleDevice
    with pytest.raises(TypeError, match="is no Strategy; give an instance"):
        choose_strategy(TrainingArguments(), wrong)


def test_a_users_own_strategy_overrides_only_what_differs(tmp_path: Any) -> None:
    class Counting(SingleDevice):
        steps = 0

        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().step(*args, **kwargs)

    strategy = Counting("cpu")
    Trainer(Classifier(), arguments(tmp_path, max_steps=3), points(), strategy=strategy).train()
    assert strategy.steps == 3


class Restless(Callback):
    """Draws from every generator and reads other data wherever it can."""

    def disturb(self, run: Run) -> None:
        torch.rand(3)
        np.random.rand(3)
        random.random()
        list(torch.utils.data.DataLoader(points(5), shuffle=True))

    on_step_begin = on_substep_end = on_pre_optimizer_step = on_step_end = on_epoch_begin = disturb


class Noisy(list[Any]):
    """Augments its samples."""

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return sample | {"x": sample["x"] + torch.randn(4) * 0.1 + np.random.rand() + random.random()}


DISTURBANCES: dict[str, dict[str, Any]] = {
    "evaluations": {"eval_strategy": "steps", "eval_steps": 1},
    "evaluations in workers": {"eval_strategy": "steps", "eval_steps": 5, "dataloader_num_workers": 2},
    "one worker": {"dataloader_num_workers": 1},
    "logs and checkpoints": {"logging_steps": 1, "save_strategy": "steps", "save_steps": 3},
    "callbacks": {"callbacks": [Restless()]},
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_dropout_and_augmentation_depend_on_the_place_in_the_data_alone(tmp_path: Any, disturbance: str) -> None:
    def trained(callbacks: Any = (), **changes: Any) -> list[torch.Tensor]:
        model = Classifier()
        given = Noisy(points(9)) if "eval_strategy" in changes else None
        args = arguments(tmp_path, gradient_accumulation_steps=2, **changes)
        Trainer(model, args, Noisy(points()), given, strategy=SingleDevice("cpu"), callbacks=callbacks).train()
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained()
    torch.manual_seed(99)
    found = trained(**DISTURBANCES[disturbance])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(trained(seed=43), expected, strict=True))


# On a GPU


@needs_cuda
def test_cuda_trains_as_the_cpu_does(tmp_path: Any) -> None:
    losses: dict[str, list[float]] = {}

    class Watch(Callback):
        def __init__(self, name: str) -> None:
            self.found = losses.setdefault(name, [])

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            if "loss" in record:
                self.found.append(record["loss"])

    for device in ("cpu", "cuda"):
        model = Classifier()
        model.layers[1] = nn.Identity()  # generators differ
        trainer = Trainer(
            model, arguments(tmp_path, logging_steps=1), points(), callbacks=[Watch(device)],
            strategy=SingleDevice(device),
        )  # fmt: skip
        result = trainer.train()
        assert next(model.parameters()).device.type == device
        assert result.metrics["peak_memory_gib"] > 0
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)


@needs_cuda
@pytest.mark.parametrize("workers", [0, 2])
def test_cuda_copies_ahead_without_mixing_batches_up(workers: int) -> None:
    from trainer_kit.data.collate import stack
    from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
    from trainer_kit.data.sampling import Layout

    rows = [torch.full((1 << 16,), float(index)) for index in range(64)]
    strategy = SingleDevice("cuda")
    strategy.setup()
    loader = TrainLoader(rows, Layout(4), LoaderConfig(stack, 0, workers, pin_memory=True))
    seen = []
    for micro in strategy.prepare_loader(loader.micro_batches(0, 0, 16)):
        batch = strategy.to_device(micro.batch)
        assert batch.device == strategy.device
        for _ in range(20):  # enough work for the next copy to overlap
            batch = batch * 1.0
        seen.append((micro.indices, batch[:, [0, -1]].mean(1)))
    assert [column.tolist() for _, column in seen] == [[float(index) for index in indices] for indices, _ in seen]


@needs_cuda
def test_cuda_yields_each_batch_before_an_error_of_the_next_one() -> None:
    def batches() -> Iterator[SimpleNamespace]:
        yield from (SimpleNamespace(batch=torch.ones(1)) for _ in range(2))
        raise OSError("the third batch")

    strategy = SingleDevice("cuda")
    strategy.setup()
    found = []
    with pytest.raises(OSError, match="the third batch"):
        found.extend(strategy.prepare_loader(batches()))
    assert len(found) == 2


@needs_cuda
def test_cuda_dropout_is_seeded_by_step(tmp_path: Any) -> None:
    def trained(**changes: Any) -> list[torch.Tensor]:
        model = Classifier()
        given = points(9) if changes.get("eval_strategy") else None
        Trainer(model, arguments(tmp_path, **changes), points(), given, strategy=SingleDevice("cuda")).train()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = trained()
    torch.manual_seed(99)
    for changes in ({}, {"eval_strategy": "steps", "eval_steps": 1}, {"dataloader_num_workers": 2}):
        assert all(torch.equal(*pair) for pair in zip(trained(**changes), expected, strict=True))


@needs_cuda
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_cuda_trains_in_half_precision(tmp_path: Any, mode: str) -> None:
    trainer = Trainer(Classifier(), arguments(tmp_path, mixed_precision=mode), points(), strategy=SingleDevice("cuda"))
    result = trainer.train()
    assert result.training_loss == pytest.approx(result.training_loss)
    assert trainer.run.strategy.scales_gradients == (mode == "fp16")


@needs_cuda
def test_cuda_skips_without_the_host() -> None:
    strategy = SingleDevice("cuda")
    strategy.setup()
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.tensor([1.0, float("nan"), 1.0], device="cuda")
    with SyncDebug():
        strategy.step(optimizer, 1.0, nonfinite="skip")
    assert weight.tolist() == [1.0, 1.0, 1.0]


@needs_cuda
def test_cuda_memory_is_that_of_tensors() -> None:
    strategy = SingleDevice("cuda")
    strategy.setup()
    before = strategy.device_info.memory()
    held = torch.ones(2**27, device=strategy.device, dtype=torch.uint8)  # 1/8 GiB
    during = strategy.device_info.memory()
    assert during["memory_gib"] == pytest.approx(before["memory_gib"] + 1 / 8, abs=0.01)
    del held
    after = strategy.device_info.memory()
    assert after["peak_memory_gib"] >= during["memory_gib"]
    assert after["reserved_memory_gib"] >= after["memory_gib"]

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.fake_cuda import Gpus
from kit.models import Linear
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from trainer_kit import Callback, Trainer, TrainingArguments
from trainer_kit.callbacks import Memory
from trainer_kit.run import Run

GIB = 2**30


def step(run: Run, callback: Memory) -> None:
    assert run.optimizer is not None
    run.model(torch.ones(2, 4)).sum().backward()
    callback.on_pre_optimizer_step(run)
    run.optimizer.step()
    run.optimizer.zero_grad()


def test_figures_of_the_strategy_and_of_the_host(make_run: Callable[..., Run]) -> None:
    run = make_run()
    figures = Memory().metrics(run)
    assert figures.keys() == {*run.strategy.device_info.memory(), "host_memory_gib"}
    # The two are read one after the other.
    assert 0.01 < figures["memory_gib"] < figures["peak_memory_gib"] + 0.01 < 1000
    assert figures["host_memory_gib"] == pytest.approx(figures["memory_gib"], abs=0.1)


def test_the_parts_are_those_of_the_tensors(make_run: Callable[..., Run]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    run, callback = make_run(model=model), Memory()
    run.optimizer = torch.optim.Adam(model.parameters())
    callback.on_train_begin(run)
    step(run, callback)
    parameters = sum(each.numel() for each in model.parameters())
    figures = callback.metrics(run)
    assert figures["anatomy/weights_gib"] * GIB == pytest.approx(4 * (parameters + 8 + 8) + 8)  # a step counter too
    assert figures["anatomy/gradients_gib"] * GIB == pytest.approx(4 * parameters)
    assert figures["anatomy/optimizer_gib"] * GIB == pytest.approx(8 * parameters + 4 * 6)  # a step for each of six
    assert "anatomy/activations_gib" not in figures  # the peak is that of the process, with all that Python needs
    assert callback.summary(run).keys() == figures.keys()


def test_memory_that_tensors_share_counts_once(make_run: Callable[..., Run]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # two parameters in one place
    run, callback = make_run(model=model), Memory()
    callback.on_train_begin(run)
    flat = torch.zeros(32)
    model[0].weight.grad, model[1].weight.grad = flat[:16].view(4, 4), flat[16:].view(4, 4)  # as DDP's buckets
    step(run, callback)
    figures = callback.metrics(run)
    assert figures["anatomy/weights_gib"] * GIB == pytest.approx(4 * 16)
    assert figures["anatomy/gradients_gib"] * GIB == pytest.approx(4 * 32)
    assert figures["anatomy/optimizer_gib"] == 0  # SGD has no states


def test_a_sparse_gradient_takes_what_it_holds(make_run: Callable[..., Run]) -> None:
    model = nn.Embedding(1000, 4, sparse=True)
    run, callback = make_run(model=model), Memory()
    model(torch.tensor([3, 5])).sum().backward()
    callback.on_pre_optimizer_step(run)
    assert callback.metrics(run)["anatomy/gradients_gib"] * GIB == pytest.approx(2 * 8 + 2 * 4 * 4)


def test_states_that_keep_their_numbers_in_other_tensors(make_run: Callable[..., Run]) -> None:
    model = nn.Linear(4, 4, bias=False)
    run, callback = make_run(model=model), Memory()
    run.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.optimizer.state[model.weight] = {"moment": TwoTensor(torch.zeros(16), torch.zeros(16))}
    callback.on_train_begin(run)
    step(run, callback)
    assert callback.metrics(run)["anatomy/optimizer_gib"] * GIB == pytest.approx(2 * 4 * 16)


def test_parts_are_measured_anew_when_layers_are_unfrozen(make_run: Callable[..., Run]) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    run, callback = make_run(model=model), Memory()
    run.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    callback.on_train_begin(run)
    step(run, callback)
    assert callback.metrics(run)["anatomy/gradients_gib"] * GIB == pytest.approx(4 * 16)
    model[0].requires_grad_(True)
    step(run, callback)
    assert callback.metrics(run)["anatomy/optimizer_gib"] * GIB == pytest.approx(4 * 32)
    step(run, callback)
    assert callback.metrics(run)["anatomy/gradients_gib"] * GIB == pytest.approx(4 * 32)


class Awake(Memory):
    """Its hooks are called in each step, since a subclass may override them."""


class Unfreeze(Callback):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            run.model.requires_grad_(True)


def test_hooks_that_are_left_out_miss_no_measurement(tmp_path: Path) -> None:
    model, both = Linear(), [Memory(), Awake()]
    model.layer.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = TrainingArguments(
        str(tmp_path), max_steps=6, logging_steps=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, log_level="error",
    )  # fmt: skip
    dataset = [{"x": torch.ones(4), "labels": torch.tensor(0)}] * 48
    Trainer(model, args, dataset, callbacks=[*both, Unfreeze()], optimizer=optimizer).train()
    assert [each._gradients for each in both] == [4 * 15, 4 * 15]
    assert [each._idle_hooks for each in both] == [("on_pre_optimizer_step",)] * 2


def test_an_allocator_tells_fragmentation_and_the_rest(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"memory_gib": 3.0, "reserved_memory_gib": 4.0, "peak_memory_gib": 3.5}
    run, callback = make_run(), Memory()
    monkeypatch.setattr(run.strategy.device_info, "memory", lambda: dict(figures))
    assert callback.metrics(run)["fragmentation"] == 0.25
    assert "anatomy/activations_gib" not in callback.metrics(run)
    step(run, callback)
    found = callback.metrics(run)
    parts = sum(found[f"anatomy/{name}_gib"] for name in ("weights", "gradients", "optimizer"))
    assert found["anatomy/activations_gib"] == 3.5 - parts
    figures.update(reserved_memory_gib=0.0, memory_gib=0.0)
    assert "fragmentation" not in callback.metrics(run)


def test_a_device_that_reports_nothing(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, callback = make_run(), Memory()
    monkeypatch.setattr(
        run.strategy.device_info, "memory", lambda: {"memory_gib": "not reported", "peak_memory_gib": "not reported"}
    )
    step(run, callback)
    found = callback.metrics(run)
    assert found["anatomy/weights_gib"] > 0
    assert all(isinstance(value, float) for value in found.values())


def test_in_a_training_on_a_device_without_content(make_run: Callable[..., Run]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to("meta")
    run, callback = make_run(), Memory()
    run.model, run.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device="meta")).sum().backward()
    callback.on_pre_optimizer_step(run)
    figures = callback.metrics(run)
    assert figures["anatomy/weights_gib"] * GIB == figures["anatomy/gradients_gib"] * GIB == pytest.approx(4 * 58)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_the_parts_of_a_gpus_memory(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.Linear(2048, 3))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}

    model, dataset = Wide(), [{"x": torch.randn(4), "labels": torch.tensor(index % 3)} for index in range(64)]
    args = TrainingArguments(str(tmp_path), max_steps=8, per_device_train_batch_size=16, save_strategy="no")
    figures = Trainer(model, args, dataset).train().metrics
    weights = 4 * sum(each.numel() for each in model.parameters()) / GIB
    assert figures["anatomy/weights_gib"] == pytest.approx(weights, rel=0.01)
    assert figures["anatomy/gradients_gib"] == pytest.approx(weights, rel=0.01)
    assert figures["anatomy/optimizer_gib"] == pytest.approx(2 * weights, rel=0.01)
    assert 0 <= figures["anatomy/activations_gib"] < figures["peak_memory_gib"]
    assert 0 <= figures["fragmentation"] < 1


def test_fragmented_gpu_memory_is_a_warning_at_the_end(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    trainer = Trainer(nn.Linear(4, 2), TrainingArguments(str(tmp_path), report_to="none"))
    Memory().summary(trainer.run)
    assert "fragmented" not in caplog.text
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30 * GIB)
    Memory().summary(trainer.run)
    assert "torch's allocator holds 40 GiB of GPU memory, 10 GiB more" in caplog.text

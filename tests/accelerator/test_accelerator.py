"""Accelerator in one process: preparing, steps, precision, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from kit.disks import fill, small_disk
from kit.static_shapes import Static
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit.accelerator import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    PreparedLoader,
    PreparedOptimizer,
    PreparedScheduler,
    ProjectConfiguration,
    set_seed,
    tracking,
)
from trainer_kit.callbacks import read_log


def loader(length: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


def parts(**options: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer, loader(), StepLR(optimizer, 1, gamma=0.5))
    return accelerator, *prepared


# Preparing


def test_prepare_gives_back_the_same_order() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, data = StepLR(optimizer, 1), loader()
    kinds = {"model": nn.Linear, "optimizer": PreparedOptimizer, "scheduler": PreparedScheduler, "data": PreparedLoader}
    given = {"scheduler": scheduler, "data": data, "none": None, "optimizer": optimizer, "model": model}
    made = dict(zip(given, accelerator.prepare(*given.values()), strict=True))
    assert made.pop("none") is None
    assert all(isinstance(each, kinds[name]) for name, each in made.items())
    assert made["model"] is model
    assert made["scheduler"].optimizers == [made["optimizer"]]
    assert accelerator.prepare(*made.values()) == tuple(made.values())  # once more changes nothing
    assert isinstance(accelerator.prepare(loader()), PreparedLoader)


def test_each_scheduler_follows_its_own_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2)]
    schedulers = [StepLR(optimizer, 1) for optimizer in optimizers]
    *prepared, first, second = accelerator.prepare(*schedulers, *optimizers)
    assert [each.optimizers for each in prepared] == [[first], [second]]
    assert accelerator.prepare(StepLR(second, 1)).optimizers == [second]


class Scheduler:
    """One of no class that is known."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def test_schedulers_of_any_class() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, own, plateau = accelerator.prepare(model, optimizer, Scheduler(), plateau)
    own.step()
    assert own.steps == 1
    for loss in (1.0, 2.0):
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_prepare_gives_back_what_it_does_not_know() -> None:
    """As accelerate does, whatever it looks like."""
    accelerate = pytest.importorskip("accelerate")
    things = [3, "model", nn.Linear, [1], None, Scheduler(), Scheduler, torch.ones(2), {"a": 1}]
    for maker in (Accelerator, accelerate.Accelerator):
        made = maker(cpu=True).prepare(nn.Linear(1, 1), *things)
        assert len(made) == 1 + len(things)
        assert all(one is other for one, other in zip(made[1:], things, strict=True))


def test_prepare_names_what_could_be_part_of_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "trainer_kit"):  # a Trainer sets the logger's level
        Accelerator(cpu=True).prepare(3, Scheduler())
    assert caplog.messages.count(
        "prepare() leaves a Scheduler as it is; register_for_checkpointing() makes it part of checkpoints"
    ) == 1  # fmt: skip


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        Accelerator(cpu=True).prepare(model)


def test_backward_before_prepare() -> None:
    """A single process has nothing to exchange; see test_ranks for several."""
    value = torch.ones((), requires_grad=True)
    Accelerator(cpu=True, gradient_accumulation_steps=2).backward(3 * value)
    assert value.grad is not None
    assert value.grad.item() == 1.5


def test_what_it_says_of_the_run(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type is DistributedType.NO
    assert DistributedType.TPU is DistributedType.XLA
    assert accelerator.sync_gradients
    assert accelerator.mixed_precision == "no"
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.project_dir == accelerator.logging_dir == tmp_path


def test_scripts_print_the_state() -> None:
    """Each of transformers' example scripts does, before anything else."""
    accelerator = Accelerator(cpu=True)
    assert (
        str(accelerator.state)
        == "AcceleratorState(NO, process 0 of 1, local process 0, device cpu, mixed precision no)"
    )
    assert accelerator.state.num_processes == 1


def test_cpu_false_leaves_it_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `Accelerator(cpu=options.cpu)`."""
    monkeypatch.setattr(
        "trainer_kit.accelerator.accelerator.choose_strategy", lambda args, **_: seen.append(args) or Static()
    )
    seen: list[Any] = []
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    Accelerator(cpu=False)
    monkeypatch.delenv("TRAINER_KIT_USE_CPU")
    Accelerator(cpu=False)
    assert [args.use_cpu for args in seen] == [True, False]


def test_the_steps_of_accumulation_may_be_set() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 3
    synced = []
    for _ in range(6):
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True] * 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps=0 must be at least 1"):
        accelerator.gradient_accumulation_steps = 0


def test_backward_takes_what_torch_takes() -> None:
    accelerator, model, *_ = parts()
    loss = model(torch.ones(1, 4)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert model.weight.grad.tolist() == [[2.0] * 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_model_is_unwrapped() -> None:
    accelerator, own = Accelerator(cpu=True), nn.Linear(4, 1)
    model = accelerator.prepare(torch.compile(own))
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own


def test_what_the_launcher_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"mixed_precision": "int8"}, ValueError, "mixed_precision='int8'"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps=0 must be at least 1"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(2)},
            ValueError,
            "give gradient_accumulation_steps or gradient_accumulation_plugin, not both",
        ),
        (
            {"kwargs_handlers": [3]},
            TypeError,
            "kwargs_handlers holds a int; it takes AORecipeKwargs, AutocastKwargs, ",
        ),
        ({"log_with": "wnadb"}, ValueError, "log_with='wnadb' is not known; use 'tensorboard', 'jsonl', .*, or an"),
        ({"log_with": object()}, TypeError, r"log_with holds <object .*>, which has no log\(values, step\)"),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Accelerator(cpu=True, **options)


def test_a_project_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="total_limit=0 keeps no checkpoint"):
        ProjectConfiguration(total_limit=0)
    with pytest.raises(ValueError, match="iteration=-1 is negative"):
        ProjectConfiguration(iteration=-1)


def test_handlers_without_effect_in_one_process() -> None:
    handlers = [DistributedDataParallelKwargs(static_graph=True), InitProcessGroupKwargs(timeout=timedelta(seconds=5))]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, dataloader_config=DataLoaderConfiguration())
    assert accelerator.num_processes == 1


# Steps


def test_accumulation_is_the_mean_over_batches() -> None:
    accelerator, model, optimizer, batches, scheduler = parts(gradient_accumulation_steps=4)
    expected = copy.deepcopy(model)
    inputs, targets = loader().dataset.tensors  # type: ignore[attr-defined]
    nn.functional.mse_loss(expected(inputs), targets).backward()
    rates = []
    for batch, labels in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(batch), labels))
            if accelerator.sync_gradients:
                torch.testing.assert_close(model.weight.grad, expected.weight.grad)
                weight = model.weight.detach().clone()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.1, 0.1, 0.1, 0.05]
    torch.testing.assert_close(model.weight, weight - 0.1 * expected.weight.grad)
    assert model.weight.grad is None


@pytest.mark.parametrize("with_loader", [True, False])
def test_the_end_of_a_loader(with_loader: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=with_loader)
    accelerator, model, optimizer, batches, _ = parts(gradient_accumulation_plugin=plugin)
    synced = []
    for _ in range(2):
        for batch, _ in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
    of_an_epoch = [False, False, True, True]
    assert synced == (of_an_epoch * 2 if with_loader else [False, False, True] * 2 + [False, False])
    assert accelerator.flow.steps == (4 if with_loader else 2)


def test_clipping() -> None:
    accelerator, model, optimizer, _, _ = parts(gradient_accumulation_steps=2)
    inputs = torch.full((1, 4), 3.0)
    with accelerator.accumulate(model):
        accelerator.backward(model(inputs).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 0.1) is None
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        assert float(model.weight.grad.abs().max()) == 1.5  # half of the step, as it is
    with accelerator.accumulate(model):
        accelerator.backward(model(inputs).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm) == pytest.approx((4 * 9 + 1) ** 0.5)
        assert float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) == pytest.approx(1.0, rel=1e-4)
        accelerator.clip_grad_value_(model.weight, 0.2)
        assert float(model.weight.grad.max()) == pytest.approx(0.2)
        optimizer.step()


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
def test_a_norm_holds_no_graph() -> None:
    accelerator, model, *_ = parts()
    accelerator.backward(model(torch.ones(2, 4)).pow(2).sum(), create_graph=True)
    assert not accelerator.clip_grad_norm_(model.parameters(), 1.0).requires_grad
    model.zero_grad()


def test_fp16_unscales_once_and_leaves_out_overflows() -> None:
    accelerator, model, optimizer, _, scheduler = parts(mixed_precision="fp16")
    scaler = accelerator.strategy.precision.scaler  # type: ignore[union-attr]
    assert scaler is not None
    scale, weight = scaler.get_scale(), model.weight.detach().clone()
    rates = []
    for factor in (0.25, float("inf"), 0.25):
        accelerator.backward(model(torch.ones(1, 4)).sum() * factor)
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        if factor == 0.25:
            assert float(norm) == pytest.approx(5**0.5 / 4)
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped == optimizer.step_was_skipped == (factor != 0.25)
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.05, 0.05, 0.025]
    assert scaler.get_scale() == scale / 2
    torch.testing.assert_close(model.weight, weight - (0.1 + 0.05) / 4)


def test_fp16_clips_only_the_optimizer_whose_parameters_are_clipped() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    models = accelerator.prepare(nn.Linear(4, 1), nn.Linear(4, 1))
    optimizers = accelerator.prepare(*(torch.optim.SGD(model.parameters(), lr=0.1) for model in models))
    before = [model.weight.detach().clone() for model in models]
    accelerator.backward((models[0](torch.ones(1, 4)) + models[1](torch.ones(1, 4))).sum() / 4)
    accelerator.clip_grad_norm_(models[0].parameters(), 1e9)
    assert float(models[1].weight.grad.max()) == 65536.0 / 4
    for optimizer in optimizers:
        optimizer.step()
    for model, weight in zip(models, before, strict=True):
        torch.testing.assert_close(model.weight, weight - 0.1 / 4)


def test_a_closure() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    inputs = torch.eye(4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        accelerator.backward(loss)
        return float(loss.detach())

    assert optimizer.step(closure) > 1e-3
    assert closure() < 1e-6
    accelerator, model, optimizer, _, _ = parts(mixed_precision="fp16")
    with pytest.raises(ValueError, match=r"step\(closure\) cannot be left out where fp16 overflows; use bf16"):
        optimizer.step(lambda: 0.0)


def test_a_prepared_optimizer_is_an_optimizer() -> None:
    _, model, optimizer, _, _ = parts()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["lr"] == 0.1
    assert repr(optimizer).startswith("PreparedOptimizer (\nParameter Group 0")
    schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] > 0.04
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad(set_to_none=False)
    assert float(model.weight.grad.abs().sum()) == 0.0


# Precision


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_models_compute_in_mixed_precision(mixed_precision: str) -> None:
    seen = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, values: torch.Tensor, factor: float = 1.0) -> dict[str, Any]:
            result = self.layer(values)
            seen.append(result.dtype)
            return {"result": result * factor, "rest": [result, 3]}

    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    own = Model()
    model = accelerator.prepare(own)
    assert model is own
    output = model(torch.ones(1, 2), factor=2.0)
    half = torch.bfloat16 if mixed_precision == "bf16" else torch.float16
    assert seen == [half]
    assert output["result"].dtype == output["rest"][0].dtype == torch.float32
    assert output["rest"][1] == 3
    with accelerator.autocast():
        assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == half
    assert list(inspect.signature(model.forward).parameters) == ["values", "factor"]

    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.layer.weight)
    nn.init.zeros_(copied.layer.bias)
    assert not copied(torch.ones(1, 2))["result"].any()  # the copy's own layer
    assert model(torch.ones(1, 2))["result"].any()
    assert seen == [half] * 3

    accelerator.prepare(model)  # once more changes nothing
    assert accelerator.unwrap_model(model) is own
    model(torch.ones(1, 2))
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is own
    assert own(torch.ones(1, 2))["result"].dtype == torch.float32
    assert seen == [half] * 4 + [torch.float32]


def test_without_mixed_precision_nothing_is_changed() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    prepared = Accelerator(cpu=True).prepare(model)
    assert "forward" not in vars(prepared)
    assert prepared(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_forward_method_of_the_instance() -> None:
    model = nn.Linear(2, 2)
    model.forward = lambda values: values + 1  # type: ignore[method-assign]
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert prepared(torch.zeros(2)).tolist() == [1.0, 1.0]


# The rest


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    Accelerator(cpu=True).print("loss", 0.5, sep="=")
    assert capsys.readouterr().out == "loss=0.5\n"


def test_alone_everything_is_as_it_was() -> None:
    accelerator = Accelerator(cpu=True)
    tree = {"a": torch.arange(3), "b": (torch.tensor(2.0),)}
    gathered = accelerator.gather(tree)
    assert gathered["a"].tolist() == [0, 1, 2]
    assert gathered["b"][0].tolist() == [2.0]
    assert accelerator.gather_for_metrics(["x", "y"]) == ["x", "y"]
    assert accelerator.gather_for_metrics({"text": "x"}) == [{"text": "x"}]
    assert accelerator.gather_for_metrics(np.arange(3)) == [0, 1, 2]
    assert accelerator.gather_for_metrics(np.array(3)) == [3]
    assert accelerator.gather_for_metrics(torch.arange(2), use_gather_object=True) == [tensor_equal(torch.arange(2))]
    reduced = accelerator.reduce(tree["a"], "mean")
    assert reduced.tolist() == [0, 1, 2]
    assert reduced is not tree["a"]
    assert accelerator.reduce(tree["a"], scale=2.0).tolist() == [0.0, 2.0, 4.0]
    assert accelerator.pad_across_processes(tree, dim=0)["a"] is tree["a"]
    accelerator.wait_for_everyone()
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pass
    assert accelerator.on_main_process(lambda value: value + 1)(1) == 2
    assert accelerator.on_local_main_process(lambda: 3)() == 3
    assert accelerator.on_process(process_index=1)(lambda: 3)() == 3  # as under accelerate
    assert accelerator.on_local_process(local_process_index=1)(lambda: 3)() == 3


class tensor_equal:  # noqa: N801
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Tensor) and torch.equal(self.tensor, other)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["gather", "reduce", "pad_across_processes"])
def test_only_tensors(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got a str; give a tensor, or a tree of tensors"):
        getattr(Accelerator(cpu=True), name)({"a": [torch.ones(1), "text"]})


def test_an_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="reduction='min' is not known; use 'sum', 'mean', 'max' or 'none'"):
        Accelerator(cpu=True).reduce(torch.ones(1), "min")  # type: ignore[arg-type]


def test_saving(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["a"].tolist() == [1.0, 1.0]
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.safetensors"]
    with pytest.raises(ValueError, match=r"safe_serialization=True writes safetensors, but the file is '.*a\.pt'"):
        accelerator.save({}, tmp_path / "a.pt", safe_serialization=True)
    with pytest.raises(AttributeError, match="local object"):
        accelerator.save(lambda: 3, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["a"].tolist() == [1.0, 1.0]  # as it was
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.safetensors"]


def test_saving_a_model(tmp_path: Path) -> None:
    accelerator, model, *_ = parts(mixed_precision="bf16")
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]
    accelerator.save_model(model, tmp_path / "model", max_shard_size=8)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="safe_serialization=False would write a pickle"):
        accelerator.save_model(model, tmp_path / "model", safe_serialization=False)


def test_free_memory() -> None:
    accelerator, model, optimizer, batches, scheduler = parts()
    model, optimizer, batches, scheduler = accelerator.free_memory(model, optimizer, batches, scheduler)
    assert model is optimizer is batches is scheduler is None
    assert accelerator._prepared.counts() == {"models": 0, "optimizers": 0, "schedulers": 0, "loaders": 0}
    assert accelerator.clear() == []


def test_set_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: int, **options: Any) -> list[float]:
        set_seed(seed, **options)
        return [random.random(), np.random.rand(), float(torch.rand(()))]

    assert drawn(3) == drawn(3) == drawn(3, device_specific=True) != drawn(4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert drawn(3, device_specific=True) == drawn(4)
    with pytest.raises(ValueError, match="seed=-1 is negative"):
        set_seed(-1)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def only_own_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "installed_trackers", lambda: ["tensorboard", "jsonl"])


def test_custom_trackers(tmp_path: Path) -> None:
    class Tracker:
        name = "mine"

        def __init__(self) -> None:
            self.tracker = "inner"
            self.calls: list[Any] = []

        def start(self) -> None:
            self.calls.append("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.calls.append(values)

        def log(self, values: dict[str, Any], step: int | None = None, more: int = 0) -> None:
            self.calls.append((values, step, more))

        def finish(self) -> None:
            self.calls.append("finish")

    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=[tracker, "jsonl"], project_dir=tmp_path)
    assert accelerator.log_with == [tracker, "jsonl"]
    accelerator.init_trackers("demo", {"lr": 0.1})
    accelerator.log({"loss": float("nan")}, step=2, log_kwargs={"mine": {"more": 7}})
    assert accelerator.get_tracker("mine") is tracker
    assert accelerator.get_tracker("mine", unwrap=True) == "inner"
    with pytest.raises(ValueError, match="no tracker is named 'wandb'; name it in log_with= and call init_trackers"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert tracker.calls[:2] == ["start", {"lr": 0.1}]
    assert tracker.calls[2][1:] == (2, 7)
    assert tracker.calls[3:] == ["finish"]
    assert '"loss": "nan"' in (tmp_path / "demo" / "log.jsonl").read_text()


def test_trackers_need_a_folder() -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl")
    with pytest.raises(
        ValueError, match="log_with='jsonl' writes files; give Accelerator project_dir= or logging_dir="
    ):
        accelerator.init_trackers("demo")


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("demo", {"lr": 0.1}, init_kwargs={"tensorboard": {"flush_secs": 1}})
    accelerator.log({"loss": torch.tensor(2.5), "note": "text", "pair": {"a": 1, "b": 2}}, step=4)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "demo")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 2.5)]
    assert {"config/text_summary", "note/text_summary"} <= set(events.Tags()["tensors"])
    pair = [EventAccumulator(str(tmp_path / "demo" / f"pair_{name}")).Reload().Scalars("pair")[0] for name in "ab"]
    assert [(event.step, event.value) for event in pair] == [(4, 1.0), (4, 2.0)]


def test_a_log_whose_last_line_is_cut_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
        accelerator.init_trackers("demo", {"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=step)
        path = accelerator.get_tracker("jsonl", unwrap=True)
        if step == 1:
            path.write_bytes(path.read_bytes()[:-5])
    assert [(record["event"], record["step"]) for record in read_log(path)] == [
        ("config", 0),
        ("config", 0),
        ("log", 2),
    ]


def test_what_tensorboard_cannot_show_is_named(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("demo")
    with pytest.warns(UserWarning, match=r"leaves out .*'weights' is a Tensor of shape \(3,\)"):
        accelerator.log({"weights": torch.ones(3), "loss": torch.tensor(2.0)}, step=1)
    with pytest.warns(UserWarning, match="leaves out .*'decay' is None"):
        accelerator.log({"weights": torch.ones(3), "decay": None}, step=2)
    tracker = accelerator.trackers[0]
    assert tracker.writer is tracker.tracker
    accelerator.end_training()
    (file,) = (tmp_path / "demo").glob("events.*")
    events = LegacyEventFileLoader(str(file)).Load()
    assert [event.summary.value[0].tag for event in events if event.summary.value] == ["loss"]


def test_every_tracker_gets_plain_numbers(tmp_path: Path) -> None:
    class Tracker:
        name = "mine"

        def log(self, values: Any, step: int | None = None) -> None:
            found.append(values)

    found: list[Any] = []
    accelerator = Accelerator(cpu=True, log_with=Tracker(), project_dir=tmp_path)
    accelerator.init_trackers("demo")
    picture, loss = object(), torch.tensor(0.5, requires_grad=True)
    accelerator.log({"a": loss, "b": np.float32(2), "c": {"d": torch.tensor([3])}, "e": "text", "f": picture, "g": {}})
    assert found == [{"a": 0.5, "b": 2.0, "c": {"d": 3}, "e": "text", "f": picture, "g": {}}]
    assert [type(found[0][name]) for name in "ab"] == [float, float]


def test_a_full_disk_ends_no_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture, only_own_trackers: None) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with small_disk(tmp_path / "disk") as disk:
        accelerator = Accelerator(cpu=True, log_with="all", project_dir=disk)
        accelerator.init_trackers("demo")
        accelerator.log({"loss": 1.0, "pair": {"a": 1.0}}, step=1)
        filler = fill(disk)
        with caplog.at_level("WARNING", logger="trainer_kit"):
            for step in range(2, 200):
                accelerator.log({"loss": 1.0, "pair": {"a": 1.0}}, step=step)
        filler.unlink()
        accelerator.log({"loss": 1.0, "pair": {"a": 1.0}}, step=200)
        accelerator.end_training()
        events = [event.step for event in EventAccumulator(str(disk / "demo")).Reload().Scalars("loss")]
        pairs = [event.step for event in EventAccumulator(str(disk / "demo" / "pair_a")).Reload().Scalars("pair")]
        lines = [record["step"] for record in read_log(disk / "demo" / "log.jsonl")]
    for steps in (events, pairs, lines):
        assert (steps[0], steps[-1]) == (1, 200)
        assert 199 not in steps
    assert sorted(message.partition(" could")[0] for message in caplog.messages) == [
        "the tracker 'jsonl'", "the tracker 'tensorboard'",
    ]  # fmt: skip


@pytest.mark.slow
def test_importing_is_cheap() -> None:
    script = "import sys, trainer_kit.accelerator; print([name for name in sys.argv[1:] if name in sys.modules])"
    command = [sys.executable, "-c", script, "transformers", "tensorboard", "torch.utils.tensorboard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_schedule_of_a_lambda_can_be_saved(tmp_path: Path) -> None:
    accelerator, model, optimizer, _, _ = parts()
    schedule = accelerator.prepare(LambdaLR(optimizer, lambda step: 0.9**step))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    schedule.step()
    accelerator.save_state(tmp_path / "state")
    schedule.step()
    accelerator.load_state(tmp_path / "state")
    assert schedule.last_epoch == 1


def test_a_repeated_loss_weighs_as_many_samples_as_its_batch_has() -> None:
    """As transformers' scripts without a Trainer average it; accelerate is asked for the same."""
    values = torch.arange(19.0)
    means = []
    for kind in (accelerate.Accelerator, Accelerator):
        accelerator = kind(cpu=True)
        loader = accelerator.prepare(DataLoader(values, batch_size=8))
        parts = [accelerator.gather_for_metrics(batch.mean().repeat(8)) for batch in loader]
        assert [len(part) for part in parts] == [8, 8, 3]
        means.append(torch.cat(parts).mean().item())
    assert means == [9.0, 9.0]

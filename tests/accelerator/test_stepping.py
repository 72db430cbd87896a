"""The parts of a training step that only some scripts need."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from trainer_kit.accelerator import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    GradScalerKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from trainer_kit.accelerator.data_loader import SeedableRandomSampler, prepare_data_loader


def uneven(split_batches: bool, length: int) -> tuple[list[list[int]], int, list[bool], float]:
    config = DataLoaderConfiguration(even_batches=False, split_batches=split_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1, momentum=None))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.eval()  # its buffers are shared nevertheless
    loader = accelerator.prepare(DataLoader(range(length), batch_size=2))
    batches, ends = [], []
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch[:, None].float()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            batches.append(batch.tolist())
            ends.append(accelerator.gradient_state.end_of_dataloader)
    weight = accelerator.unwrap_model(model)[0].weight.item()
    accelerator.wait_for_everyone()
    return batches, len(loader), ends, weight


@pytest.mark.distributed
def test_uneven_inputs_are_joined() -> None:
    first, second = on_ranks(2, uneven, False, 5)
    assert (first[0], second[0]) == ([[0, 1], [4]], [[2, 3]])
    assert (first[1], second[1]) == (2, 1)
    assert (first[2], second[2]) == ([False, True], [True])
    assert first[3] == second[3]
    first, second = on_ranks(2, uneven, True, 5)
    assert (first[0], second[0]) == ([[0], [2], [4]], [[1], [3]])
    assert first[3] == second[3]
    first, second = on_ranks(2, uneven, False, 7)
    assert (first[0], second[0]) == ([[0, 1], [4, 5]], [[2, 3], [6]])


def train_unprepared() -> tuple[str, float, float]:
    """The refusal; and the weight after a step as it advises, and after one of a prepared model."""
    accelerator, weights = Accelerator(cpu=True), []
    values = torch.ones(1, 1) * (1 + accelerator.process_index)
    for is_prepared in (False, True):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
        trained = accelerator.prepare_model(model) if is_prepared else model
        loss = trained(values).sum()
        if is_prepared:
            accelerator.backward(loss)
        else:
            with pytest.raises(ValueError, match="no model is prepared") as refusal:
                accelerator.backward(loss)
            loss.backward()
            model.weight.grad = accelerator.reduce(model.weight.grad, "mean")
        optimizer.step()
        weights.append(model.weight.item())
    return str(refusal.value), weights[0], weights[1]


@pytest.mark.distributed
def test_gradients_of_a_model_that_is_not_prepared() -> None:
    first, second = on_ranks(2, train_unprepared)
    assert first == second
    assert first[1] == first[2] == pytest.approx(1 - 0.1 * 1.5)
    assert first[0].endswith(
        "so that each of the 2 processes would keep its own gradients; call prepare(model, …) before, or "
        "loss.backward() and then accelerator.reduce(parameter.grad, 'mean') for each parameter"
    )


class Normalized(torch.nn.Module):
    """A batch norm, and a cache that differs between processes."""

    def __init__(self, rank: int, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.BatchNorm1d(1) if norm else torch.nn.Identity()
        self.head = torch.nn.Linear(1, 1)
        self.register_buffer("cache", torch.full((2 + rank,), float(rank)), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(values)).square().mean()  # type: ignore[no-any-return]


def join_statistics() -> list[Any]:
    """Statistics of a batch norm after an uneven loop, those under torch's DDP alone, and the cache."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader, found = accelerator.prepare(DataLoader(range(10), batch_size=2)), list[Any]()
    plain = DistributedDataParallel(Normalized(0))
    prepared = accelerator.prepare_model(Normalized(accelerator.process_index))
    without_norm = accelerator.prepare_model(Normalized(accelerator.process_index, norm=False))
    for model, join in (
        (plain, Join([plain])),
        (prepared, accelerator.join_uneven_inputs([prepared])),
        (without_norm, accelerator.join_uneven_inputs([without_norm])),
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with join:
            for batch in loader:
                model(batch[:, None].float()).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([each.tolist() for each in model.module.state_dict().values()])
    assert not prepared.joinable().broadcast_buffers  # each step sends them again
    return [*found, prepared.module.cache.tolist()]


@pytest.mark.distributed
def test_joined_processes_have_the_statistics_of_torchs_own_join() -> None:
    first, second = on_ranks(2, join_statistics)
    assert first[:3] == second[:3]
    assert first[0][2:5] == first[1][2:5]
    assert (first[3], second[3]) == ([0.0, 0.0], [1.0, 1.0, 1.0])


def triggered() -> list[list[float]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    batch, gradients = torch.ones(1, 1) * (1 + accelerator.process_index), []
    with accelerator.no_sync(model):
        losses = [model(batch).sum() for _ in range(2)]
    for number, loss in enumerate(losses):
        if number:
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
        else:
            accelerator.backward(loss)
        gradients.append(accelerator.unwrap_model(model).weight.grad.item())
    return gradients


@pytest.mark.distributed
def test_a_backward_pass_exchanges_after_no_sync() -> None:
    assert on_ranks(2, triggered) == [[1.0, 3.0], [2.0, 3.0]]  # the mean of 2 and 4


def pickled() -> bool:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(range(8), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    model(torch.ones(1, 2)).sum().backward()
    copies = pickle.loads(pickle.dumps((model, optimizer, scheduler, loader, accelerator)))
    assert torch.equal(copies[0].weight, model.weight)
    assert torch.equal(copy.deepcopy(model).weight, model.weight)
    assert copies[2].get_last_lr() == scheduler.get_last_lr()
    assert [batch.tolist() for batch in copies[3]] == [batch.tolist() for batch in loader]
    assert copies[4].state.__dict__ == accelerator.state.__dict__
    return isinstance(loader, DataLoader)


def test_prepared_objects_are_pickled() -> None:
    assert pickled()


@pytest.mark.distributed
def test_prepared_objects_of_two_processes_are_pickled() -> None:
    assert on_ranks(2, pickled) == [True, True]


def test_the_order_of_a_seedable_sampler() -> None:
    """As accelerate's: a permutation from the seed plus the epoch."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(9), batch_size=3, shuffle=True))
    for epoch in (0, 1):
        expected = torch.randperm(9, generator=torch.Generator().manual_seed(7 + epoch))
        assert torch.equal(torch.cat([*loader]), expected)


def test_set_epoch_reaches_the_sampler_of_a_batch_sampler() -> None:
    sampler = SeedableRandomSampler(range(6), data_seed=1)
    loader = prepare_data_loader(DataLoader(range(6), batch_sampler=BatchSampler(sampler, 2, False)))
    loader.set_epoch(5)
    assert sampler.epoch == 5
    expected = torch.randperm(6, generator=torch.Generator().manual_seed(6))
    assert torch.equal(torch.cat([*loader]), expected)
    assert isinstance(DataLoader(range(6), sampler=RandomSampler(range(6))).sampler, RandomSampler)


@pytest.mark.parametrize(("name", "value"), [("num_processes", 3), ("process_index", 1), ("device", "meta")])
def test_a_loader_of_another_run(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* differs from the run's"):
        prepare_data_loader(DataLoader(range(6)), **{name: value})


def test_handlers(tmp_path: Path) -> None:
    profile = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "trace"))
    handlers = [GradScalerKwargs(init_scale=8.0), AutocastKwargs(enabled=False), profile]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0
    layer = torch.nn.Linear(2, 2)
    with accelerator.autocast():
        assert layer(torch.ones(1, 2)).dtype == torch.float32
    with accelerator.autocast(AutocastKwargs()):
        assert layer(torch.ones(1, 2)).dtype == torch.float16
    with accelerator.profile() as profiler:
        layer(torch.ones(1, 2))
    assert profiler.key_averages()
    assert (tmp_path / "trace" / "profile_0.json").stat().st_size
    with ProfileKwargs(["cpu"], record_shapes=True).build() as profiler:
        layer(torch.ones(3, 2))
    assert [3, 2] in [shape for event in profiler.key_averages(True) for shape in event.input_shapes]
    with pytest.raises(ValueError, match=r"activities has 'gpu'; use"), accelerator.profile(ProfileKwargs(["gpu"])):
        pass
    with pytest.raises(ValueError, match="kwargs_handlers holds two ProfileKwargs; give one"):
        Accelerator(cpu=True, kwargs_handlers=[profile, profile])


def test_gradients_are_unscaled_once() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 4.0
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)
    assert model.weight.grad.item() == 1.0


def test_the_compiler() -> None:
    assert Accelerator(cpu=True).compile_options is None
    options = Accelerator(cpu=True, dynamo_backend="eager").compile_options
    assert options is not None
    assert options.backend == "eager"
    assert TorchDynamoPlugin("inductor", disable=True).compile_options() is None
    with pytest.raises(ValueError, match="the compiler 'FASTEST' is not known"):
        Accelerator(cpu=True, dynamo_backend="fastest")
    model = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin("eager")).prepare(torch.nn.Linear(2, 2))
    assert model._compiled_call_impl is not None


def test_fields_without_effect_are_named() -> None:
    with pytest.warns(UserWarning, match="dispatch_batches=True has no effect"):
        DataLoaderConfiguration(dispatch_batches=True)


def test_a_model_that_is_only_evaluated() -> None:
    model = torch.nn.Linear(2, 2)
    assert Accelerator(cpu=True).prepare_model(model, evaluation_mode=True) is model


def join_for_epochs() -> tuple[list[float], list[float], int, list[float], str]:
    """Adam with weight decay and a schedule, two epochs of 3 and 2 batches."""
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config, step_scheduler_with_optimizer="once")
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(range(10), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    weights = []
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                accelerator.backward(model(batch[:, None].float()).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        weights.append(accelerator.unwrap_model(model).weight.item())
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="is not possible with gradient_accumulation_steps=2") as refusal:
        accelerator.join_uneven_inputs([model]).__enter__()
    moments = [state["exp_avg"].sum().item() for state in optimizer.state.values()]
    return weights, moments, accelerator.flow.steps, scheduler.get_last_lr(), str(refusal.value)


@pytest.mark.distributed
def test_processes_that_joined_earlier_go_on_with_the_same_state() -> None:
    first, second = on_ranks(2, join_for_epochs)
    assert first == second
    assert first[2:4] == (6, [pytest.approx(0.1 / 2**6)])


class WideMomentum(torch.optim.Optimizer):
    """SGD whose momentum is float32 for weights of 16 bits too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(0.1 * momentum.to(parameter.dtype))


def join_with_wide_states() -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, WideMomentum(model.parameters()))
    loader = accelerator.prepare(DataLoader(range(10), batch_size=2))
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            inputs = (batch[:, None] / torch.tensor([3, 7, 11, 13])).to(torch.bfloat16)
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [(str(each["momentum"].dtype), each["momentum"].tolist()) for each in optimizer.state.values()]


@pytest.mark.distributed
def test_joined_processes_share_wide_states_of_narrow_weights_exactly() -> None:
    first, second = on_ranks(2, join_with_wide_states)
    assert first == second
    assert [dtype for dtype, _ in first] == ["torch.float32"] * 2

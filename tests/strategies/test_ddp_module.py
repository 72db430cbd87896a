"""The model under DDP: which parameters and buffers are exchanged, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.branches import Branches, own_rank, points, quiet
from kit.launches import Launches
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer
from trainer_kit.callbacks import Freezing
from trainer_kit.loop.batch_size_finder import _Buffers
from trainer_kit.strategies.ddp import DDP, Replica
from trainer_kit.strategies.ddp_module import SharedBuffers, take_from_main
from trainer_kit.strategies.grad_exchange import GradientExchange


def train_branches(folder: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    options = make()
    trainer = Trainer(Branches(seed=own_rank()), quiet(folder), points(), **options)
    trainer.run.model.both = options.get("strategy") is None  # type: ignore[assignment]
    trainer.train()
    return {name: value.clone() for name, value in trainer.run.model.state_dict().items()}


def nothing() -> dict[str, Any]:
    return {}


@pytest.mark.smoke
@pytest.mark.distributed
def test_weights_and_buffers_are_the_main_ones_everywhere(tmp_path: Path) -> None:
    """Models that begin with other weights, and a batch norm that sees other samples."""
    first, second = on_ranks(2, train_branches, str(tmp_path), nothing)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)
    assert first["norm.num_batches_tracked"] == 6


def frozen() -> dict[str, Any]:
    return {"callbacks": [Freezing("used.*", until_step=2), Freezing("norm.*", from_step=3, until_step=5)]}


@pytest.mark.distributed
def test_freezing_and_unfreezing_keeps_gradients_exchanged(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_branches, str(tmp_path), frozen)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)


def with_spare() -> dict[str, Any]:
    return {"strategy": DDP(device="cpu")}


def with_spare_allowed() -> dict[str, Any]:
    return {"strategy": DDP(device="cpu", find_unused_parameters=True)}


@pytest.mark.distributed
def test_parameters_without_a_loss_are_named(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_branches, str(tmp_path), with_spare):
        assert isinstance(result, RankFailed)
        assert isinstance(result.error, ValueError)
        assert "spare.weight and spare.bias took no part in the loss" in str(result.error)
        assert "find_unused_parameters=True" in str(result.error)
    on_ranks(2, train_branches, str(tmp_path), with_spare_allowed)


def by_a_method(model: nn.Module, batch: Any) -> torch.Tensor:
    return model.used(batch["x"]).square().mean()  # type: ignore[operator,no-any-return]


def with_a_method() -> dict[str, Any]:
    return {"compute_loss": by_a_method}


class Hidden(torch.autograd.Function):
    """Computes gradients of weights that the graph of the loss does not show."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        ctx.model = model
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        for parameter in ctx.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return torch.ones(()), None


def behind_the_graph(model: nn.Module, batch: Any) -> torch.Tensor:
    return Hidden.apply(torch.ones((), requires_grad=True), model.module)  # type: ignore[no-any-return]


def with_hidden_gradients() -> dict[str, Any]:
    return {"compute_loss": behind_the_graph}


@pytest.mark.distributed
@pytest.mark.parametrize("make", [with_a_method, with_hidden_gradients])
def test_a_loss_that_goes_round_the_model_is_refused(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_branches, str(tmp_path), make):
        assert isinstance(result, RankFailed)
        assert "call model(...) with gradients before backward" in str(result.error)


def cached_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss whose gradients are computed in parts, in its backward pass (GradCache, Gao et al. 2021)."""
    parts = batch["x"].chunk(2)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in parts])
    outputs = outputs.detach().requires_grad_()
    loss = nn.functional.cross_entropy(outputs, batch["labels"])
    (gradient,) = torch.autograd.grad(loss, outputs)
    loss = loss.detach().requires_grad_()

    def in_parts(scale: torch.Tensor) -> None:
        with torch.enable_grad():
            for part, own in zip(parts, gradient.chunk(2), strict=True):
                (model(part) * own * scale).sum().backward()  # type: ignore[no-untyped-call]

    loss.register_hook(in_parts)
    return loss


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def train_with(loss: Any, folder: str, batch_size: int, accumulation: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(4, generator=generator, dtype=torch.float64), "labels": torch.tensor(place % 3)}
        for place in range(46)
    ]
    args = quiet(folder)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = batch_size, accumulation
    Trainer(model, args, data, compute_loss=loss).train()
    return [value for each in model.parameters() for value in each.flatten().tolist()]


@pytest.mark.distributed
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_may_call_the_model_in_its_backward_pass(accumulation: int, tmp_path: Path) -> None:
    """Also with a last step in which the processes have other numbers of samples."""
    expected = train_with(plain_loss, str(tmp_path / "alone"), 8, accumulation)
    for found in on_ranks(2, train_with, cached_loss, str(tmp_path / "two"), 4, accumulation):
        assert found == pytest.approx(expected, rel=0, abs=1e-12)


class Odd(Branches):
    """Buffers of many kinds, and a cache that is each process's own."""

    def __init__(self) -> None:
        super().__init__()
        rank = own_rank()
        self.register_buffer("small", torch.tensor([rank], dtype=torch.int16))
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("eight", torch.full((3,), float(rank)).to(torch.float8_e5m2))
        self.register_buffer("complex", torch.full((2,), complex(rank, 1)))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t() + rank)
        self.register_buffer("cache", torch.zeros(rank + 1), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.cache = torch.zeros(len(self.cache) + 1)
        self.small = self.small + 1  # replaced, not changed
        return super().forward(x, y)


def train_odd(folder: str) -> tuple[int, dict[str, Any]]:
    trainer = Trainer(Odd(), quiet(folder), points(), strategy=DDP(device="cpu", find_unused_parameters=True))
    trainer.train()
    state = {name: value.to(torch.complex64).tolist() for name, value in trainer.run.model.state_dict().items()}
    return len(trainer.run.model.cache), state  # type: ignore[arg-type]


@pytest.mark.distributed
def test_buffers_of_any_kind_are_the_main_ones_and_caches_are_left_alone(tmp_path: Path) -> None:
    (first_cache, first), (second_cache, second) = on_ranks(2, train_odd, str(tmp_path))
    assert first == second
    assert second["small"] == [6]
    assert second_cache == first_cache + 1


class Growing(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen = torch.zeros(len(self.seen) + 1)
        return super().forward(x, y)


def train_growing(folder: str) -> None:
    Trainer(
        Growing(), quiet(folder), points(), strategy=DDP(device="cpu", find_unused_parameters=True)
    ).train()  # fmt: skip


@pytest.mark.distributed
def test_a_kept_buffer_that_grows_is_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_growing, str(tmp_path)):
        assert "the buffer seen had the shape [1] and now has [2]" in str(result.error)


class Normed(nn.Module):
    """20 batch norms in two dtypes, with other statistics on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(own_rank())
        self.norms = nn.ModuleList(nn.BatchNorm1d(3 + number) for number in range(20))
        self.norms[3].double()
        for norm in self.norms:
            norm.running_mean.uniform_()
            norm.num_batches_tracked += own_rank()


def count_launches(folder: str) -> tuple[list[int], dict[str, list[float]]]:
    strategy = DDP(device="cpu")
    strategy.setup()
    module = Normed()
    exchange = GradientExchange(module)
    replica = Replica(module, lambda each: each, exchange=exchange)  # type: ignore[arg-type,return-value]
    with Launches() as sent:
        take_from_main(replica.buffers_to_share())
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(own_rank()))
    with Launches() as exchanged:
        exchange.finish(strategy.collectives.all_reduce_ints)
    assert all((parameter.grad == 0.5).all() for parameter in module.parameters())
    buffers = _Buffers(module)
    buffers.keep()
    with Launches() as kept:
        buffers.keep()
    values = {name: value.double().reshape(-1).tolist() for name, value in module.named_buffers()}
    return [sent.count, exchanged.count, kept.count], values


@pytest.mark.distributed
def test_buffers_and_gradients_are_copied_with_few_launches(tmp_path: Path) -> None:
    """60 buffers and 40 gradients; ResNet-50's 159 buffers took 320 launches a step."""
    (first, values), (second, others) = on_ranks(2, count_launches, str(tmp_path))
    assert values == others
    assert first == [2, 7, 3]  # pack and send; pack, divide and send two dtypes, and agree; copy three dtypes
    assert second == [4, 7, 3]  # receive, and copy three dtypes


def train_with_a_strange_parameter(folder: str) -> None:
    model, weight = Branches(), nn.Parameter(torch.ones(1))
    model.both = True
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    Trainer(model, quiet(folder), points(), optimizer=optimizer).train()


@pytest.mark.distributed
def test_parameters_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_with_a_strange_parameter, str(tmp_path)):
        assert "the optimizer has 1 parameters that are not the model's" in str(result.error)


def test_a_replica_shows_what_the_module_has() -> None:
    class Named(nn.Linear):
        config = "mine"

    replica = Replica(Named(2, 2), lambda module: module)  # type: ignore[arg-type,return-value]
    assert replica.config == "mine"
    assert [name for name, _ in replica.named_parameters()] == ["module.weight", "module.bias"]
    with pytest.raises(AttributeError, match="nowhere"):
        replica.nowhere  # noqa: B018


class Stepping(nn.Module):
    """Computes its loss in `training_step`, as a LightningModule does, and calls itself there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out

    def training_step(self, batch: Any, number: int) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == -1:
            raise RuntimeError("broken")
        return {"loss": nn.functional.mse_loss(self(batch["x"]), batch["labels"])}


def loss_of_step(module: Any, batch: Any) -> Any:
    return module.training_step(batch, 0)


def train_by_steps(folder: str, size: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(1)
    samples = [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(16)
    ]
    model = Stepping().double()
    data = [{name: value.double() for name, value in each.items()} for each in samples]
    options = {"per_device_train_batch_size": size, "num_train_epochs": 2, "save_strategy": "no"}
    trainer = Trainer(model, arguments(Path(folder), **options), data, data, compute_loss=loss_of_step)
    trainer.train()
    assert model.calls > 0
    return [*model.layer.weight.tolist(), [trainer.evaluate()["eval_loss"]]]


@pytest.mark.distributed
def test_a_training_step_exchanges_gradients(tmp_path: Path) -> None:
    (expected,) = (train_by_steps(str(tmp_path / "one"), 4),)
    for found in on_ranks(2, train_by_steps, str(tmp_path / "two"), 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_step_is_called_in_place_of_the_module() -> None:
    module = Stepping()
    replica, calls = Replica(module, lambda module: None), list[Any]()
    module.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    batch = {"x": torch.ones(2, 4), "labels": torch.ones(2, 1)}
    assert replica.training_step(batch, 0)["loss"].requires_grad
    module.calls = -2
    with pytest.raises(RuntimeError, match="broken"):
        replica.training_step(batch, 0)
    assert replica(torch.ones(2, 4)).shape == (2, 1)
    assert calls == [(2, 1), (2, 1)]
    with pytest.raises(AttributeError, match="has no attribute 'training_step'"):
        Replica(nn.Linear(1, 1), lambda module: None).training_step  # noqa: B018
    module.training_step = torch.tensor(0.5)  # type: ignore[assignment, method-assign]
    assert float(replica.training_step) == 0.5


def test_statistics_of_keras_are_shared() -> None:
    model = nn.Module()
    names = ["net/norm/gamma", "net/norm/moving_mean", "net/norm/moving_variance"]
    model.weights = nn.ParameterDict({name: nn.Parameter(torch.ones(2), requires_grad=False) for name in names})
    shared = SharedBuffers(model)
    assert shared.names == ["weights.net/norm/moving_mean", "weights.net/norm/moving_variance"]
    assert [*map(id, shared.current())] == [id(model.weights[name]) for name in names[1:]]


def test_the_mode_is_that_of_the_module() -> None:
    module = nn.Dropout()
    replica = Replica(module, lambda module: None)
    assert replica.training
    module.eval()
    assert not replica.training
    assert replica.train() is replica
    assert module.training
    replica.eval()
    assert not module.training


def loss_by_mode(model: Any, batch: Any) -> torch.Tensor:
    out: torch.Tensor = model(batch["x"]) if model.training else model(batch["x"]) * 0 + 5
    return (out - batch["labels"]).square().mean()


def evaluate_by_mode(folder: str) -> float:
    data = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(4)]
    trainer = Trainer(nn.Linear(4, 1), arguments(Path(folder)), data, data, compute_loss=loss_by_mode)
    return trainer.evaluate()["eval_loss"]


@pytest.mark.distributed
def test_a_loss_may_depend_on_the_mode(tmp_path: Path) -> None:
    assert on_ranks(2, evaluate_by_mode, str(tmp_path)) == [25.0, 25.0]

"""Gradients that are exchanged during a backward pass, also where a process aborts it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.branches import own_rank, quiet
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_kit import Callback, Run, Trainer
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.grad_exchange import GradientExchange

pytestmark = pytest.mark.distributed


class Deep(nn.Module):
    """Layers of several buckets: 3 MiB with a limit of 1 MiB, and one layer that a loss may leave out."""

    def __init__(self, fails: tuple[int, ...] = (), when: str = "backward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))
        self.spare = nn.Linear(256, 256)
        self.fails, self.when, self.passes, self.uses_spare = fails, when, 0, True

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training and type(x) is torch.Tensor:
            self.passes += 1
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 6 and self.training and self.passes in self.fails and type(x) is torch.Tensor:
                if self.when == "forward":
                    refuse()
                x.register_hook(refuse)
        x = self.spare(x) if self.uses_spare else x
        return {"loss": (x.mean(1) - labels).square().mean()}


def refuse(_: Any = None) -> None:
    raise torch.OutOfMemoryError("out of memory")


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(256, generator=generator), "labels": torch.tensor(1.0)} for _ in range(96)]


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.values += [record["loss"]] if "loss" in record else []


def train(folder: str, finds: bool, make: Callable[[], nn.Module], compression: Any = "no", **options: Any) -> Any:
    """Return this rank's losses, weights, and samples at once."""
    args = quiet(folder, per_device_train_batch_size=8, max_steps=4, logging_steps=1, auto_find_batch_size=finds)
    model, losses = make(), Losses()
    strategy = DDP(device="cpu", bucket_cap_mb=1, gradient_compression=compression, **options)
    trainer = Trainer(model, args, samples(), strategy=strategy, callbacks=[losses])
    trainer.train()
    return losses.values, [value.clone() for value in model.state_dict().values()], trainer.run.state.micro_batch


def are_equal(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("compression", ["no", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bits_are_those_of_distributed_data_parallel(tmp_path: Path, ranks: int, compression: str) -> None:
    """With three ranks, the place of a gradient in its bucket decides on its last bits."""
    found = on_ranks(ranks, train, str(tmp_path / "found"), True, Deep, compression)
    plain = on_ranks(ranks, train, str(tmp_path / "plain"), False, Deep, compression)
    for one, other in zip(found, plain, strict=True):
        assert len(one[0]) == 4
        assert are_equal(one, other)


def failing(when: str, ranks: tuple[int, ...]) -> nn.Module:
    return Deep((2,) if own_rank() in ranks else (), when)


@pytest.mark.parametrize("compression", ["no", "bf16"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_runs_out_of_memory_ends_the_exchange(tmp_path: Path, when: str, compression: str) -> None:
    """In the second step, in which the other rank has begun to send."""
    one = on_ranks(2, train, str(tmp_path / "one"), True, functools.partial(failing, when, (1,)), compression)
    both = on_ranks(2, train, str(tmp_path / "both"), True, functools.partial(failing, when, (0, 1)), compression)
    assert [each[2] for each in (*one, *both)] == [4] * 4
    assert all(map(are_equal, one, both))
    assert all(map(torch.equal, one[0][1], one[1][1]))


def train_after_a_failure(folder: str, fails: bool) -> Any:
    """Train a model again whose first training failed in a backward pass, and whose Trainer still lives."""
    model, kept = Deep(), []
    strategy = DDP(device="cpu")
    if fails:
        handle = model.layers[6].weight.register_hook(refuse_to_go_on)
        kept.append(Trainer(model, quiet(folder, auto_find_batch_size=True), samples(), strategy=DDP(device="cpu")))
        with pytest.raises(KeyError):
            kept[0].train()
        handle.remove()
        model.zero_grad()
    for _ in range(2):
        kept.append(Trainer(model, quiet(folder, auto_find_batch_size=True), samples(), strategy=strategy))
        kept[-1].train()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return [tensor.clone() for tensor in model.state_dict().values()]


def refuse_to_go_on(_: Any) -> None:
    raise KeyError("an error of the user")


def test_a_training_after_a_failed_one_has_its_own_gradients(tmp_path: Path) -> None:
    found = on_ranks(2, train_after_a_failure, str(tmp_path / "found"), True)
    expected = on_ranks(2, train_after_a_failure, str(tmp_path / "expected"), False)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


def sends(folder: str) -> list[str]:
    """Return the order of a step's collectives and of the gradient of the first layer, the last to be computed."""
    events, model, all_reduce = list[str](), Deep(), dist.all_reduce

    def send(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            events.append("sent")
        return all_reduce(*args, **kwargs)

    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(dist, "all_reduce", send)
        train(folder, True, lambda: model)
    return events


def test_gradients_are_sent_while_others_are_computed(tmp_path: Path) -> None:
    for events in on_ranks(2, sends, str(tmp_path)):
        assert events == ["sent", "sent", "sent", "first layer", "sent"] * 4


def without_spare(ranks: tuple[int, ...]) -> nn.Module:
    model = Deep()
    model.uses_spare = own_rank() not in ranks
    return model


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_parameters_that_some_ranks_do_not_use(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    make = functools.partial(without_spare, ranks)
    found = on_ranks(2, train, str(tmp_path / "found"), True, make)
    plain = on_ranks(2, train, str(tmp_path / "plain"), False, make, find_unused_parameters=True)
    assert all(map(are_equal, found, plain))
    assert torch.equal(found[0][1][-1], Deep().spare.bias) is (len(ranks) == 2)


def train_without_room_to_send(folder: str, ranks: tuple[int, ...], uses_spare: bool) -> Any:
    """Lack memory for the second bucket of the second step."""
    send, calls = GradientExchange._send, []

    def send_or_refuse(self: GradientExchange, bucket: Any) -> None:
        calls.append(bucket)
        if len(calls) == 6 and own_rank() in ranks:
            refuse()
        send(self, bucket)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(GradientExchange, "_send", send_or_refuse)
        return train(folder, True, functools.partial(without_spare, () if uses_spare else (0, 1)))


@pytest.mark.parametrize("uses_spare", [False, True])
def test_no_memory_for_a_bucket_ends_the_exchange_too(tmp_path: Path, uses_spare: bool) -> None:
    """The unused layer is in the first bucket, so that all are sent after the backward pass."""
    one = on_ranks(2, train_without_room_to_send, str(tmp_path / "one"), (1,), uses_spare)
    both = on_ranks(2, train_without_room_to_send, str(tmp_path / "both"), (0, 1), uses_spare)
    assert [each[2] for each in (*one, *both)] == [4] * 4
    assert all(map(are_equal, one, both))


class Reentrant(Deep):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(2):
            x = checkpoint(self.spare, x.requires_grad_(), use_reentrant=True)
        return super().forward(x, labels)


def test_a_gradient_that_is_computed_twice_is_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train, str(tmp_path), True, Reentrant):
        assert isinstance(result, RankFailed)
        assert "the gradient of spare." in str(result.error)
        assert "use use_reentrant=False, or set auto_find_batch_size=False" in str(result.error)

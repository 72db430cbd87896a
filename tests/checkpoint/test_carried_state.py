"""What a model keeps from batch to batch outside of its state_dict comes back with a resume."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.breaking import BreaksAt
from kit.ranks import on_ranks
from kit.trainer import arguments
from torch import nn

from trainer_kit import Callback, Run, Trainer
from trainer_kit.checkpoint.format.trainer_state import read_carried
from trainer_kit.errors import CheckpointError


class Spiking(nn.Module):
    """A membrane in a buffer that is not persistent, which grows to the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("membrane", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.membrane if len(self.membrane) else torch.zeros_like(x)
        self.membrane = 0.5 * before.detach() + self.layer(x)
        return self.membrane


class Queue(nn.Module):
    """A memory in buffers that are not persistent, with its position, and a cache that the first pass computes."""

    def __init__(self, cached: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cached = cached
        self.register_buffer("memory", torch.zeros(3, 4), persistent=False)
        self.register_buffer("position", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.full((4,), self.cached)
        out = self.layer(x) * self.cache + self.memory.mean(0)
        self.memory[self.position] = out[0].detach()
        self.position = (self.position + 1) % 3
        return out


class Recurrent(nn.Module):
    """A hidden state and a count in attributes; weights that are normalized before each pass."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = nn.utils.weight_norm(nn.Linear(4, 4))
        self.hidden: Any = None
        self.count, self.shape, self.kind = 0, None, "rnn"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = 0 if self.hidden is None else self.hidden[0].detach()
        self.hidden = (self.layer(x) + before, x)
        self.count += 1
        self.shape = x.shape
        return self.hidden[0]


class Drawing(nn.Module):
    """Noise of generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.generator, self.other = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.rand(4, generator=self.generator)) + float(self.other.normal())


KINDS = [Spiking, Queue, Drawing]


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(place % 4)) for place in range(24)]


class Losses(Callback):
    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.found: list[float] = []

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.stop:
            run.requests.save = run.requests.stop = True

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.found += [record["loss"]] if "loss" in record else []


def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(x), labels)


def train(
    folder: Path, kind: Callable[[], nn.Module], stop: int | None = None, loss: Any = None, **given: Any
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model, losses = kind() if loss else WithLoss(kind()), Losses(stop)
    settings = {"max_steps": 8, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3}
    settings |= {"per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd"} | given
    args = arguments(folder, **settings)
    Trainer(model, args, samples(), compute_loss=loss, callbacks=[losses]).train(resume_from_checkpoint=True)
    return losses.found, {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("loss", [None, compute_loss])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_bits(kind: type[nn.Module], loss: Any, tmp_path: Path) -> None:
    straight, weights = train(tmp_path / "straight", kind, loss=loss)
    first, _ = train(tmp_path / "resumed", kind, stop=4, loss=loss)
    rest, resumed = train(tmp_path / "resumed", kind, loss=loss)
    assert first + rest == straight
    assert resumed == weights


def test_a_rollback_restores_it_too(tmp_path: Path) -> None:
    class Breaks(Queue):
        seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Breaks.seen += self.training
            return super().forward(x) * (float("nan") if Breaks.seen == 6 else 1)

    broken, _ = train(tmp_path, Breaks, nonfinite="rollback", async_save=False, save_steps=4)
    assert len(broken) > 5
    (carried,) = read_carried(tmp_path / "run" / "checkpoint-8")
    assert carried["buffers"].keys() == {"model.memory", "model.position"}
    assert carried["buffers"]["model.position"] == 8 % 3
    assert carried["buffers"]["model.memory"].isfinite().all()


class Bank(nn.Module):
    """A loss with a memory of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        normal = self.norm(out) * 0 + self.norm.running_mean  # its version does not show that it changes
        loss = nn.functional.cross_entropy(out + self.bank + normal, labels)
        self.bank.lerp_(out.detach().mean(0), 0.5)
        self.count += 1
        return loss


def test_modules_of_compute_loss_carry_state_too(tmp_path: Path) -> None:
    def loss_of() -> Any:
        bank = Bank()
        return lambda model, batch: bank(model(batch[0]), batch[1])

    straight, weights = train(tmp_path / "straight", lambda: nn.Linear(4, 4), loss=loss_of())
    first, _ = train(tmp_path / "resumed", lambda: nn.Linear(4, 4), stop=4, loss=loss_of())
    rest, resumed = train(tmp_path / "resumed", lambda: nn.Linear(4, 4), loss=loss_of())
    assert first + rest == straight
    assert resumed == weights


class Calibrated(nn.Module):
    """A scale that the first three passes find."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.passes < 3:
            self.passes += 1
            self.scale.mul_(0.5).add_(x.abs().mean(0))
        return self.layer(x) / self.scale


def test_what_no_longer_changes_comes_back_with_each_resume(tmp_path: Path) -> None:
    straight, weights = train(tmp_path / "straight", Calibrated)
    losses = []
    for stop in (4, 6, 8):
        losses += train(tmp_path / "resumed", Calibrated, stop=stop)[0]
    rest, resumed = train(tmp_path / "resumed", Calibrated)
    assert losses + rest == straight
    assert resumed == weights


class Centered(nn.Module):
    """A center that is written through `.data`, which counts as no version of a tensor."""

    assigns = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("center", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.assigns:
            self.center.data = 0.9 * self.center + 0.1 * out.detach().mean(0)
        else:
            self.center.data.lerp_(out.detach().mean(0), 0.1)
        return out - self.center.clone()


class Assigned(Centered):
    assigns = True


@pytest.mark.parametrize("kind", [Centered, Assigned])
def test_writes_to_data_are_seen(kind: type[nn.Module], tmp_path: Path) -> None:
    straight, weights = train(tmp_path / "straight", kind)
    first, _ = train(tmp_path / "resumed", kind, stop=4)
    rest, resumed = train(tmp_path / "resumed", kind)
    assert first + rest == straight
    assert resumed == weights


@pytest.mark.parametrize("size", [4, 600])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_teacher_outside_of_the_model_continues(is_frozen: bool, size: int, tmp_path: Path) -> None:
    def student() -> nn.Module:
        return nn.Sequential(nn.Linear(4, size), nn.Linear(size, size), nn.Linear(size, 4))

    def loss_of() -> Any:
        torch.manual_seed(1)
        teacher = student().requires_grad_(not is_frozen)

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                target = teacher(batch[0])
                for own, followed in zip(teacher.parameters(), model.parameters(), strict=True):
                    own.data.lerp_(followed.data, 0.1)
            return (model(batch[0]) - target).square().mean()

        return loss

    straight, weights = train(tmp_path / "straight", student, loss=loss_of())
    first, _ = train(tmp_path / "resumed", student, stop=4, loss=loss_of())
    (carried,) = read_carried(tmp_path / "resumed" / "run" / "checkpoint-4")
    assert len(carried["buffers"]) == 6
    rest, resumed = train(tmp_path / "resumed", student, loss=loss_of())
    assert first + rest == straight
    assert resumed == weights


class Moco(nn.Module):
    """Holds the model and, next to it, a center of its own."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("center", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        loss = ((out - self.center) * self.scale).square().mean()
        self.center.lerp_(out.detach().mean(0), 0.5)
        self.scale.data.mul_(0.9)
        return loss


def test_what_holds_the_model_carries_its_own_tensors(tmp_path: Path) -> None:
    def run(folder: Path, stop: int | None = None) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        encoder = nn.Linear(4, 4)
        return train(folder, lambda: encoder, stop=stop, loss=Moco(encoder).loss)

    straight, weights = run(tmp_path / "straight")
    first, _ = run(tmp_path / "resumed", stop=4)
    rest, resumed = run(tmp_path / "resumed")
    assert first + rest == straight
    assert resumed == weights


def following(teacher: nn.Linear) -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        weight: Any = model.weight
        with torch.no_grad():
            teacher.weight.data = teacher.weight.data.lerp(weight.data.to(teacher.weight.dtype), 0.1)
            target = teacher(batch[0].to(teacher.weight.dtype)).float()
        return (model(batch[0]) - target).square().mean()

    return loss


def test_a_teacher_keeps_its_dtype_and_is_still_a_parameter(tmp_path: Path) -> None:
    with torch.inference_mode():
        frozen = nn.Linear(4, 4)
    teachers = [nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), frozen]
    for stop, teacher in zip((4, 6, 8), teachers, strict=True):
        train(tmp_path, lambda: nn.Linear(4, 4), stop=stop, loss=following(teacher.requires_grad_(False)))
    assert [type(each.weight) for each in teachers] == [nn.Parameter] * 3
    assert teachers[1].weight.dtype == torch.bfloat16


def test_a_teacher_that_the_first_step_makes_is_no_cache(tmp_path: Path) -> None:
    def loss_of() -> Any:
        torch.manual_seed(1)
        teacher = nn.Linear(4, 4)
        start = teacher.weight.detach().clone()

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            if teacher.weight.equal(start):
                teacher.load_state_dict(model.state_dict())
            return (model(batch[0]) - teacher(batch[0]).detach() - 1).square().mean()

        return loss

    straight, weights = train(tmp_path / "straight", lambda: nn.Linear(4, 4), loss=loss_of())
    first, _ = train(tmp_path / "resumed", lambda: nn.Linear(4, 4), stop=4, loss=loss_of())
    rest, resumed = train(tmp_path / "resumed", lambda: nn.Linear(4, 4), loss=loss_of())
    assert first + rest == straight
    assert resumed == weights


def test_a_scripted_teacher_is_left_alone(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        teacher: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean()

    train(tmp_path, lambda: nn.Linear(4, 4), stop=4, loss=loss)
    train(tmp_path, lambda: nn.Linear(4, 4), loss=loss)


def test_a_frozen_teacher_is_not_saved(tmp_path: Path) -> None:
    teacher = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean()

    train(tmp_path, lambda: nn.Linear(4, 4), stop=4, loss=loss)
    assert not read_carried(tmp_path / "run" / "checkpoint-4")


def test_another_start_computes_its_own_cache(tmp_path: Path) -> None:
    train(tmp_path, Queue, stop=4)
    (carried,) = read_carried(tmp_path / "run" / "checkpoint-4")
    assert carried["buffers"].keys() == {"model.memory", "model.position"}
    model = Queue(cached=2.0)
    train(tmp_path, lambda: model)
    assert model.cache.eq(2).all()


def test_most_models_carry_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.utils.spectral_norm(nn.Linear(4, 4)))
    train(tmp_path, lambda: model)
    for step in (3, 6, 8):
        assert not (tmp_path / "run" / f"checkpoint-{step}" / "state" / "carried.json").exists()


def test_a_resume_names_attributes_that_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, Recurrent, stop=4)
    train(tmp_path, Recurrent, log_level="info")
    (message,) = {each.getMessage() for each in caplog.records if "training changes" in each.getMessage()}
    assert "attributes that no checkpoint holds: model.count and model.hidden; if later batches" in message


def test_values_that_no_checkpoint_holds_are_left_alone(tmp_path: Path) -> None:
    class Odd(Spiking):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
            self.nested = torch.nested.nested_tensor([torch.ones(2)])
            self.items: list[Any] = []
            self.items.append(self.items)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.sparse = self.sparse * 2
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(tmp_path, Odd, stop=4)
    (carried,) = read_carried(tmp_path / "run" / "checkpoint-4")
    assert carried["buffers"].keys() == {"model.membrane"}


def test_batches_of_another_size_begin_as_the_model_was_made(tmp_path: Path) -> None:
    train(tmp_path, Spiking, stop=4)
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with pytest.warns(UserWarning, match=r"begins without the state that the checkpoint holds for model\.membrane"):
        train(tmp_path, Spiking, **changes)
    train(tmp_path / "queue", Queue, stop=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "queue", Queue, **changes)


def test_a_generator_of_another_kind_is_a_warning(tmp_path: Path) -> None:
    class Other(Drawing):
        def __init__(self) -> None:
            super().__init__()
            self.other = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out

    train(tmp_path, Drawing, stop=4)
    with pytest.warns(UserWarning, match=r"begins without the state that the checkpoint holds for model\.other"):
        train(tmp_path, Other)


def test_a_buffer_keeps_its_memory(tmp_path: Path) -> None:
    train(tmp_path, Queue, stop=4)
    model = Queue()
    view = model.memory[0]
    train(tmp_path, lambda: model)
    assert view.data_ptr() == model.memory.data_ptr()


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    train(tmp_path, Queue, max_steps=3)
    file = tmp_path / "run" / "checkpoint-3" / "state" / "carried.json"
    file.write_text("{}")
    with pytest.raises(CheckpointError, match=r"carried\.json"):
        read_carried(file.parents[1])


def on_each_rank(folder: str, kind: type[nn.Module], stop: int | None) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _ = train(Path(folder), kind, stop)
    return losses, [str(each.message) for each in caught if "state of its own" in str(each.message)]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_goes_on_with_its_own(kind: type[nn.Module], tmp_path: Path) -> None:
    ((straight, _), _) = on_ranks(2, on_each_rank, str(tmp_path / "straight"), kind, None)
    ((first, _), _) = on_ranks(2, on_each_rank, str(tmp_path / "resumed"), kind, 4)
    ((rest, _), _) = on_ranks(2, on_each_rank, str(tmp_path / "resumed"), kind, None)
    assert first + rest == straight


def with_a_teacher(folder: str, stop: int | None, **given: Any) -> tuple[list[float], dict[str, Any]]:
    """A teacher whose norm sees the samples of its process, and a bank that only rank 1 fills."""
    torch.manual_seed(1)
    teacher: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    teacher.register_buffer("bank", torch.zeros(4))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        target, weights = teacher(batch[0]), model.weight
        if dist.get_rank() == 1:
            teacher.bank.add_(target.mean(0))
        teacher[0].weight.data.lerp_(weights.data, 0.1)
        return (model(batch[0]) - target - teacher.bank).square().mean()

    losses, _ = train(Path(folder), lambda: nn.Linear(4, 4), stop, loss=loss, **given)
    return losses, {name: value.tolist() for name, value in teacher.state_dict().items()}


@pytest.mark.distributed
def test_what_the_ranks_share_is_saved_once(tmp_path: Path) -> None:
    straight = on_ranks(2, with_a_teacher, str(tmp_path / "straight"), None)
    stopped = on_ranks(2, with_a_teacher, str(tmp_path / "resumed"), 4)
    states = read_carried(tmp_path / "resumed" / "run" / "checkpoint-4")
    names = [{name.rpartition(".")[2] for name in each["buffers"]} for each in states]
    assert names == [
        {"weight", "running_mean", "running_var", "num_batches_tracked"},
        {"running_mean", "running_var", "bank"},
    ]
    shutil.copytree(tmp_path / "resumed", tmp_path / "alone")
    rest = on_ranks(2, with_a_teacher, str(tmp_path / "resumed"), None)
    assert [each[1] for each in rest] == [each[1] for each in straight]
    assert stopped[0][0] + rest[0][0] == straight[0][0]
    # One process alone has what all had alike.
    with pytest.warns(UserWarning, match=r"each of 2 processes had a state of its own for .*running_mean") as caught:
        _, alone = with_a_teacher(str(tmp_path / "alone"), None, max_steps=4)
    assert not any("weight" in str(each.message) for each in caught)
    assert alone["0.weight"] == stopped[0][1]["0.weight"]


@pytest.mark.distributed
def test_other_ranks_than_before_begin_without_it(tmp_path: Path) -> None:
    on_ranks(2, on_each_rank, str(tmp_path), Spiking, 4)
    with pytest.warns(
        UserWarning, match=r"each of 2 processes had a state of its own for model\.membrane of the model"
    ):
        train(tmp_path, Spiking)


class Langevin(torch.optim.SGD):
    """Adds noise of a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.05)
        self.generator = torch.Generator().manual_seed(7)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each.add_(torch.randn(each.shape, generator=self.generator), alpha=0.01)
        return result


class NoisyLoss:
    def __init__(self) -> None:
        self.generators = {"noise": torch.Generator().manual_seed(3)}

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch[0] + torch.randn(batch[0].shape, generator=self.generators["noise"]))
        return nn.functional.cross_entropy(out, batch[1])


def noisy_closure() -> Callable[..., torch.Tensor]:
    generator = np.random.default_rng(3)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.from_numpy(generator.standard_normal(batch[0].shape)).float()
        return nn.functional.cross_entropy(model(batch[0] + noise), batch[1])

    return loss


class Shakes(Callback):
    """Adds noise to gradients."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def on_pre_optimizer_step(self, run: Run) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad += self.generator.gauss(0, 0.1)


OUTSIDE: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "optimizer": lambda model: {"optimizer": Langevin(model.parameters())},
    "an object": lambda model: {"compute_loss": NoisyLoss()},
    "a closure": lambda model: {"compute_loss": noisy_closure()},
    "two callbacks": lambda model: {"callbacks": [Shakes(1), Shakes(2)]},
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_generators_outside_of_the_model_continue(kind: str, tmp_path: Path) -> None:
    def run(folder: str, stop: int | None = None) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        given = {"compute_loss": compute_loss, **OUTSIDE[kind](model)}
        given["callbacks"] = [*given.get("callbacks", []), Losses(stop)]
        args = arguments(tmp_path / folder, max_steps=8, save_strategy="steps", save_steps=3, learning_rate=0.1)
        Trainer(model, args, samples(), **given).train(resume_from_checkpoint=True)
        weights: list[list[float]] = model.weight.tolist()
        return weights

    straight = run("straight")
    run("resumed", stop=4)
    assert run("resumed") == straight


def test_generators_of_datasets_are_left_to_their_own_rule(tmp_path: Path) -> None:
    class Data(list[Any], torch.utils.data.Dataset[Any]):
        generator = torch.Generator()

        def __getitem__(self, index: Any) -> Any:
            torch.rand(1, generator=self.generator)
            return super().__getitem__(index)

    class Holds(Callback):
        def __init__(self) -> None:
            self.data = dataset

    dataset = Data(samples())
    args = arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=3)
    Trainer(nn.Linear(4, 4), args, dataset, compute_loss=compute_loss, callbacks=[Holds()]).train()
    assert read_carried(tmp_path / "run" / "checkpoint-3") == []


class DrawsAt(Callback):
    """Draws from a generator of its own after some steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps, self.generator, self.drawn = steps, random.Random(1), dict[int, float]()

    def on_step_end(self, run: Run) -> None:
        if run.state.step in self.steps:
            self.drawn[run.state.step] = self.generator.random()


@pytest.mark.parametrize("saves", [[3], [3, 5], [1]])
def test_a_generator_that_is_seldom_drawn_from_continues(tmp_path: Path, saves: list[int]) -> None:
    """Only in the first step, and not between two saves."""

    def run(folder: str, stop: int | None = None) -> dict[int, float]:
        torch.manual_seed(0)
        draws = DrawsAt([1, 6])
        args = arguments(tmp_path / folder, max_steps=8, save_strategy="steps", save_steps=100)
        callbacks = [draws, Losses(stop)]
        Trainer(nn.Linear(4, 4), args, samples(), compute_loss=compute_loss, callbacks=callbacks).train(
            resume_from_checkpoint=True
        )
        return draws.drawn

    expected = run("straight")
    for stop in saves:
        run("resumed", stop)
    assert run("resumed")[6] == expected[6]


def test_a_rollback_takes_back_the_first_draw(tmp_path: Path) -> None:
    draws = DrawsAt([3])
    args = arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=2, nonfinite="rollback", async_save=False)
    Trainer(nn.Linear(4, 4), args, samples(), compute_loss=compute_loss, callbacks=[draws, BreaksAt(4)]).train()
    assert draws.drawn[3] == random.Random(1).random()

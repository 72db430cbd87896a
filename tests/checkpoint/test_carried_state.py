"""What a model keeps from batch to batch outside of its state_dict comes back with a resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import on_ranks
from kit.trainer import arguments
from torch import nn

from trainer_kit import Callback, Run, Trainer
from trainer_kit.checkpoint import read_state
from trainer_kit.checkpoint.carried_state import CarriedState
from trainer_kit.checkpoint.format.trainer_state import read_carried
from trainer_kit.errors import CheckpointError


class Recurrent(nn.Module):
    """A hidden state in a tuple, from batch to batch; attention that is kept to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.hidden: Any = None
        self.attention: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = None if self.hidden is None else tuple(each.detach() for each in self.hidden)
        self.hidden = self.cell(x, hidden)
        self.attention = self.hidden[0].softmax(-1)
        return self.attention * self.hidden[1]


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
    """Persistent memory with a position that is a plain number, and a decay that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(3, 4))
        self.position, self.decay, self.is_full = 0, 1.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) * self.decay + self.memory.mean(0) * (2 if self.is_full else 1)
        self.memory[self.position] = out[0].detach()
        self.position, self.decay = (self.position + 1) % 3, self.decay * 0.9
        self.is_full = self.is_full or self.position == 0
        return out


class Drawing(nn.Module):
    """Noise of generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.generator, self.other = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.rand(4, generator=self.generator)) + float(self.other.normal())


KINDS = [Recurrent, Spiking, Queue, Drawing]


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
    settings = {"max_steps": 8, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3} | given
    args = arguments(folder, per_device_train_batch_size=4, learning_rate=0.1, optim="sgd", **settings)
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

    broken, _ = train(tmp_path / "broken", Breaks, nonfinite="rollback", async_save=False)
    assert len(broken) > 5
    carried = read_state(tmp_path / "broken" / "run" / "checkpoint-6", "carried")
    assert carried[0]["model.decay"] == pytest.approx(0.9**6)
    assert "model.position" not in carried[0]  # it is as at the beginning


class Bank(nn.Module):
    """A loss with a memory of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(out + self.bank, labels)
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


def begun(model: nn.Module) -> CarriedState:
    state = CarriedState(model)
    state.begin(None)
    return state


def test_most_models_carry_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.LSTM(4, 4))
    state = begun(model)
    model(torch.ones(2, 4))[0].sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert state.state_dict() == {}
    train(tmp_path, lambda: nn.Linear(4, 4), max_steps=3)
    assert not (tmp_path / "run" / "checkpoint-3" / "state" / "carried.json").exists()


def test_what_each_pass_overwrites_is_left_out_once_that_is_known() -> None:
    model = Recurrent()
    state = begun(model)
    assert state.state_dict() == {}
    model(torch.ones(2, 4))
    assert state.state_dict().keys() == {"hidden", "attention"}
    model.eval()(torch.ones(2, 4))
    assert state.state_dict().keys() == {"hidden", "attention"}
    for _ in range(3):
        assert state.state_dict().keys() == {"hidden", "attention"}
        model.train()(torch.ones(2, 4))
    assert not model._forward_hooks
    assert state.state_dict().keys() == {"hidden"}
    model.hidden = None
    assert state.state_dict() == {}


def test_what_a_text_begins_without_is_not_left_out() -> None:
    model = Recurrent()
    state = begun(model)
    model(torch.ones(2, 4))
    state.state_dict()
    for _ in range(2):
        model.hidden = None
        model(torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert state.state_dict().keys() == {"hidden"}


def test_what_is_read_later_is_saved_again() -> None:
    class Reading(Recurrent):
        reads = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.attention if self.reads else torch.zeros(())
            return super().forward(x) + before.detach()

    model = Reading()
    state = begun(model)
    model(torch.ones(2, 4))
    state.state_dict()
    for _ in range(3):
        model(torch.ones(2, 4))
    assert state.state_dict().keys() == {"hidden"}
    model.reads = True
    for _ in range(3):
        model(torch.ones(2, 4))
    assert state.state_dict().keys() == {"hidden", "attention", "reads"}


def test_the_watch_ends_with_the_training(tmp_path: Path) -> None:
    model = WithLoss(Recurrent())
    args = arguments(tmp_path, max_steps=2, save_strategy="epoch", per_device_train_batch_size=4)
    Trainer(model, args, samples()).train()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_numbers_are_left_out_where_they_may_speak_of_the_structure() -> None:
    """Such as the flag of installed hooks: set without them, they would never be installed."""

    class Changing(Queue):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.position == 1 and self.changes == "hook":
                self.layer.register_forward_hook(lambda *given: None)
            if self.position == 1 and self.changes == "module":
                self.layer = nn.Sequential(self.layer)
            if self.position == 1 and self.changes == "object":
                self.cache = object()
            return super().forward(x)

        changes = "nothing"

    for changes in ("nothing", "hook", "module", "object"):
        model = Changing()
        state = begun(model)
        model.changes = changes
        for _ in range(2):
            model(torch.ones(2, 4))
        names = {"position", "decay", "changes"} if changes == "nothing" else set()
        assert state.state_dict().keys() == names, changes


def test_a_view_of_a_weight_goes_with_the_weight() -> None:
    model = nn.Linear(4, 4)
    model.view = model.weight.detach()[0]
    state = begun(model)
    with torch.no_grad():
        model.weight.add_(1)
    assert state.state_dict() == {}


def test_tensors_keep_their_place() -> None:
    model, other = Spiking(), Spiking()
    model.membrane = torch.ones(2, 4)
    other.membrane, state = torch.zeros(2, 4), begun(model)
    view = other.membrane[0]
    model.membrane += 1
    begun(other).load_state_dict(state.state_dict())
    assert other.membrane.eq(2).all()
    assert view.eq(2).all()


def test_what_the_model_does_not_take_is_a_warning() -> None:
    class Holder(nn.Module):
        generator: Any = None

    model = Holder()
    model.generator = torch.Generator()
    with pytest.warns(UserWarning, match="does not take up the state that the checkpoint holds for generator and gone"):
        begun(model).load_state_dict({"generator": torch.zeros(3), "gone.hidden": torch.zeros(1)})


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


@pytest.mark.distributed
def test_other_ranks_than_before_begin_without_what_differs(tmp_path: Path) -> None:
    on_ranks(2, on_each_rank, str(tmp_path / "hidden"), Recurrent, 4)
    on_ranks(2, on_each_rank, str(tmp_path / "alike"), Drawing, 4)
    with pytest.warns(UserWarning, match=r"each of 2 processes had a state of its own for model\.\w+"):
        train(tmp_path / "hidden", Recurrent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "alike", Drawing)

"""Checkpoints under each layout are resumed under itself and others, with the same bits of all states."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit.architectures import llama
from kit.parts import parts_of
from kit.ranks import on_ranks
from kit.token_training import whole
from scenarios.task import StopAt
from torch import nn

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.utils.pytree import tensors

LAYOUTS: dict[str, tuple[int, Any]] = {
    "single": (1, None),
    "ddp 2": (2, lambda: DDP(device="cpu")),
    "fsdp 1": (1, lambda: FSDP(device="cpu")),
    "fsdp 2": (2, lambda: FSDP(device="cpu")),
    "fsdp 3": (3, lambda: FSDP(device="cpu")),
    "fsdp 4": (4, lambda: FSDP(device="cpu")),
    "tensor 2": (2, lambda: FSDP(device="cpu", mesh={"tensor": 2}, tensor_parallel="auto")),
    "tensor 2 x shard 2": (
        4,
        lambda: FSDP(device="cpu", mesh={"shard": 2, "tensor": 2}, tensor_parallel="auto"),
    ),
    "hsdp 2x2": (4, lambda: FSDP(device="cpu", mesh={"replicate": 2, "shard": 2})),
}
QUICK = [("single", "fsdp 2"), ("ddp 2", "fsdp 2"), ("fsdp 2", "single"), ("fsdp 2", "ddp 2"), ("fsdp 2", "fsdp 2")]
QUICK += [("tensor 2 x shard 2", "fsdp 2"), ("ddp 2", "tensor 2 x shard 2"), ("tensor 2", "tensor 2")]
NAMES = [*LAYOUTS]
SLOW = [(name, NAMES[(place + further) % len(NAMES)]) for place, name in enumerate(NAMES) for further in (0, 1, 3, 5)]
SLOW = [pair for pair in SLOW if pair not in QUICK]


class Held(Callback):
    """All states of the run when training begins, and after each step.

    Those of the schedule, the callbacks and the user's own object do not depend on the layout; the run's own random
    numbers are seeded by each step.
    """

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.first: list[Any] = []
        self.last: list[Any] = []

    def on_train_begin(self, run: Run) -> None:
        self.first = self.held(run)

    def on_step_end(self, run: Run) -> None:
        self.last = self.held(run)

    def held(self, run: Run) -> list[Any]:
        assert run.optimizer is not None
        averages = [*self.ema.state_dict()["averages"].values()]
        states = [*run.model.state_dict().values(), *tensors([*run.optimizer.state.values()]), *averages]
        state, draws = run.state, run.stateful["draws"].state_dict()
        counters = [state.step, state.epoch, state.position, state.samples, state.tokens]
        plain = [{**self.ema.state_dict(), "averages": None}, run.lr_scheduler.state_dict(), counters, draws]
        return [*(whole(each).detach().clone() for each in states), *map(repr, plain)]


class Draws:
    """An object of the user's with random numbers of its own, the same on all processes."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class Drawing(Callback):
    """Draws a number in each step."""

    def on_step_begin(self, run: Run) -> None:
        torch.rand(1, generator=run.stateful["draws"].generator)


@parts_of(1000)
def train(folder: str, layout: str, steps: int, resume: bool) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    world, make = LAYOUTS[layout]
    readers = world // 2 if "tensor" in layout else world
    samples = [{"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index} for index in range(24)]
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        log_level="error", per_device_train_batch_size=12 // readers, learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    ema = EMA(decay=0.5)
    seen = Held(ema)
    model = llama(tie_word_embeddings=True, num_key_value_heads=2, intermediate_size=34).double()
    trainer = Trainer(model, args, samples, callbacks=[ema, Drawing(), seen], strategy=make and make())
    trainer.run.stateful["draws"] = Draws()
    trainer.train(resume_from_checkpoint=resume)
    return seen.first, seen.last


class Saved(NamedTuple):
    """Trainings under a layout that those under all others are compared with.

    Attributes:
        folder: Of two steps, each with a checkpoint.
        states: All of that run after its second step.
        further: Those of a run of three steps.
    """

    folder: Path
    states: list[Any]
    further: list[Any]


@pytest.fixture(scope="module")
def saved_under(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    @functools.cache
    def saved(layout: str) -> Saved:
        world, folder = LAYOUTS[layout][0], tmp_path_factory.mktemp("saved")
        _, two = on_ranks(world, train, str(folder / "two"), layout, 2, False)[0]
        _, three = on_ranks(world, train, str(folder / "three"), layout, 3, False)[0]
        return Saved(folder / "two", two, three)

    return saved


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)], ids=str
)
def test_a_resume_has_the_bits_of_the_checkpoint(
    tmp_path: Path, saved_under: Callable[[str], Saved], before: str, after: str
) -> None:
    saved = saved_under(before)
    shutil.copytree(saved.folder, tmp_path / "run")
    for first, last in on_ranks(LAYOUTS[after][0], train, str(tmp_path / "run"), after, 3, True):
        assert len(first) > 20
        for ours, theirs in zip(first, saved.states, strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        for ours, theirs in zip(last, saved.further, strict=True):
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, theirs) or before != after
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
            else:
                assert ours == theirs


class Counts(nn.Module):
    """A weight for each sample, from which a step takes 1 / (samples of the step) if it sees the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(48, 1, dtype=torch.float64))
        self.blocks = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))  # the units

    def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        zero = self.blocks(torch.zeros(1, 1)).sum() * 0
        return {"loss": self.seen[index].mean() + zero}


def see(folder: str, world: int, steps: int) -> torch.Tensor:
    args = TrainingArguments(
        output_dir=folder, num_train_epochs=1, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
        per_device_train_batch_size=12 // world, learning_rate=1.0, lr_scheduler_type="constant", optim="sgd",
        max_grad_norm=0.0, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    samples = [{"index": torch.tensor(index)} for index in range(48)]
    trainer = Trainer(Counts(), args, samples, callbacks=[StopAt(steps)], strategy=FSDP(device="cpu"))
    trainer.train(resume_from_checkpoint=True)
    return whole(trainer.run.model.seen).detach().flatten()


@pytest.mark.distributed
@pytest.mark.parametrize("worlds", [(2, 1, 2, 1), pytest.param((4, 3, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_each_sample_of_an_epoch_is_seen_once(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    for step, world in enumerate(worlds, start=1):
        seen = on_ranks(world, see, str(tmp_path / "run"), world, step)[0]
        expected = torch.full((12 * step,), -1 / 12, dtype=torch.float64)
        torch.testing.assert_close(seen[seen != 0], expected, rtol=0, atol=1e-15)

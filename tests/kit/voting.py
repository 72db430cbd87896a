"""Trainings in which callbacks make requests, on any number of ranks: at which steps they are served, and how."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from kit.branches import own_rank, points, quiet
from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import EarlyStopping, MaxTime
from trainer_kit.checkpoint import find_checkpoints, verify
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.strategies.ddp import DDP

SAMPLES = 48  # 12 steps an epoch


class Asking(Callback):
    """Makes a request in a hook, at its first call from the fifth step on, on the last rank."""

    def __init__(self, hook: str, request: str) -> None:
        self.asked, self.request = False, request
        setattr(self, hook, self._ask)

    def _ask(self, run: Run, *_: Any) -> None:
        if run.state.step >= 5 and not self.asked and own_rank() == run.strategy.world_size - 1:
            self.asked = True
            setattr(run.requests, self.request, True)


class Served(Callback):
    """Notes the steps after which requests are served."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.steps.append(("log", run.state.step))

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.steps.append(("evaluate", run.state.step))

    def on_save(self, run: Run, directory: Path) -> None:
        self.steps.append(("save", run.state.step))


class Signalled(Callback):
    """Sends SIGTERM to its own process late in the fourth step of rank 1; makes no requests."""

    is_reporter = True

    def on_optimizer_step(self, run: Run) -> None:
        if run.state.step == 3 and own_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Changing(Callback):
    """Changes the cadence of the records on rank 0 alone."""

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if own_rank() == 0:
            run.args.logging_steps = 1


class Listening(Callback):
    """Asks for a checkpoint after the third step, on rank 1, which alone has it."""

    def on_step_end(self, run: Run) -> None:
        run.requests.save = run.requests.save or run.state.step == 3


class Ragged(torch.utils.data.IterableDataset[Any]):
    """A stream of unknown length, which ends in the middle of a step and of an accumulation."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points(35))


class Broken(torch.utils.data.Dataset[Any]):
    """Its samples from a position on cannot be read on rank 1."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if own_rank() == 1 and index >= 20:
            raise OSError("the file is gone")
        return points(SAMPLES)[index]


class Line(torch.nn.Module):
    """Without statistics of a batch, so that layouts differ by rounding only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) - y).square().mean()


class Rolling(Line):
    """Its loss is not finite in the seventh step, once."""

    calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        loss = super().forward(x, y)
        return loss * torch.nan if self.training and self.calls == 7 else loss


class Result(NamedTuple):
    """What a training did.

    Attributes:
        served: The requests that were served, with their steps.
        last: The last step.
        weights: The weights.
        ahead: Number of votes begun within a step.
    """

    served: list[tuple[str, int]]
    last: int
    weights: list[float]
    ahead: int


def train(
    folder: str, callbacks: list[Callback], dataset: Any = None, model: torch.nn.Module | None = None, **changes: Any
) -> Result:
    torch.set_num_threads(1)
    args = arguments(folder, **changes)
    served, model, ahead = Served(), model or Line(), 0
    strategy = DDP(device="cpu")
    trainer = Trainer(
        model, args, dataset or points(SAMPLES), points(8), callbacks=[*callbacks, served], strategy=strategy
    )
    read = RankSync.read

    def counted(sync: RankSync) -> bool:
        nonlocal ahead
        ahead += 1
        return read(sync)

    with mock.patch.object(RankSync, "read", counted):
        trainer.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return Result(served.steps, trainer.run.state.step, weights, ahead)


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    from trainer_kit.config import environment

    values = {"max_steps": 17, "per_device_train_batch_size": 4 // environment.place().world_size, "async_save": False,
              "logging_strategy": "no", "shuffle": False, "eval_strategy": "no",
              "save_strategy": "no"}  # fmt: skip
    return quiet(folder, **(values | changes))


def ask(folder: str, hook: str, request: str, **changes: Any) -> Result:
    return train(folder, [Asking(hook, request)], **changes)


def ask_everywhere(folder: str, cases: list[tuple[str, str]]) -> list[Result]:
    return [ask(f"{folder}/{hook}-{request}", hook, request, gradient_accumulation_steps=1 + (hook == "on_substep_end"))
            for hook, request in cases]  # fmt: skip


def stop_early(folder: str) -> Result:
    callbacks = [EarlyStopping(patience=1, min_delta=1e9), MaxTime(600)]
    return train(folder, callbacks, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=3)


def change_cadence(folder: str) -> Result:
    return train(folder, [Changing()], logging_strategy="steps", logging_steps=6)


def listen_on_one_rank(folder: str) -> Result:
    return train(folder, [Listening()] if own_rank() == 1 else [])


def read_ragged(folder: str) -> Result:
    return train(folder, [], Ragged(), gradient_accumulation_steps=2)


def roll_back(folder: str) -> Result:
    cadence = {"logging_strategy": "steps", "logging_steps": 5, "save_strategy": "steps", "save_steps": 4}
    return train(folder, [], None, Rolling(), nonfinite="rollback", **cadence)


def leave(folder: str) -> tuple[Any, int, list[str]]:
    """Returns the exit code, the last step and the checkpoints, once SIGTERM came to rank 1."""
    seen: list[int] = []

    class Steps(Callback):
        is_reporter = True

        def on_step_end(self, run: Run) -> None:
            seen.append(run.state.step)

    code = None
    try:
        train(folder, [Signalled(), Steps()], save_strategy="steps", save_steps=100)
    except SystemExit as error:
        code = error.code
    found = find_checkpoints(Path(folder))
    for each in found:
        verify(each)
    return code, seen[-1], [each.name for each in found]


def read_broken(folder: str) -> tuple[str, int]:
    """Returns the error and the last step."""
    steps: list[int] = []

    class Steps(Callback):
        is_reporter = True

        def on_step_end(self, run: Run) -> None:
            steps.append(run.state.step)

    try:
        train(folder, [Steps()], Broken())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", steps[-1]
    return "", steps[-1]

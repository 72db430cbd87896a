"""Trainings of random settings, which are stopped at random moments and resumed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA, EarlyStopping, read_log
from trainer_kit.errors import CallbackError

HOOKS = (
    "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_evaluate_begin",
    "on_evaluate", "on_epoch_begin", "on_epoch_end",
)  # fmt: skip
OF_THE_RUN = ("event", "step", "epoch", "loss", "grad_norm", "learning_rate", "train_loss", "eval_loss")
"""Entries of records that are those of the run, not of one of its starts."""


class Stopped(Exception):
    """Ends a training."""


class Stop(NamedTuple):
    """The moment of a stop: the call of a hook, and whether it is by an error."""

    hook: str
    call: int
    is_error: bool


class RandomRun(NamedTuple):
    """Settings of a training; `draws` is what its samples draw from."""

    options: dict[str, Any]
    samples: int
    is_stream: bool
    draws: str
    dropout: float
    sums: bool
    evaluations: int
    callbacks: tuple[str, ...]
    stops: tuple[Stop, ...]


def random_run(seed: int) -> RandomRun:
    """Return settings by a seed."""
    pick = random.Random(seed)
    is_stream = pick.random() < 0.2
    options: dict[str, Any] = {
        "per_device_train_batch_size": pick.randrange(1, 6), "gradient_accumulation_steps": pick.choice([1, 1, 2, 3]),
        "learning_rate": pick.choice([1e-2, 1e-1]), "seed": pick.randrange(100), "shuffle": pick.random() < 0.8,
        "optim": pick.choice(["adamw_torch", "sgd", "adafactor", "muon"]),
        "weight_decay": pick.choice([0.0, 0.1]), "max_grad_norm": pick.choice([0.0, 0.1, 1.0]),
        "lr_scheduler_type": pick.choice(["linear", "cosine", "constant", "inverse_sqrt", "one_cycle", "polynomial"]),
        "logging_steps": pick.choice([1, 2, 3, 7, 0.3]), "logging_strategy": pick.choice(["steps", "steps", "epoch"]),
        "save_strategy": pick.choice(["steps", "steps", "epoch"]), "save_steps": pick.choice([1, 2, 3, 5, 0.3]),
        "async_save": pick.random() < 0.5, "save_total_limit": pick.choice([None, 1, 2]),
        "eval_strategy": pick.choice(["no", "steps", "epoch"]), "eval_steps": pick.choice([1, 2, 3, 0.4]),
        "eval_on_start": pick.random() < 0.2, "per_device_eval_batch_size": pick.choice([1, 2, 3, 7]),
    }  # fmt: skip
    if is_stream or pick.random() < 0.5:
        options["max_steps"] = pick.randrange(1, 20)
    else:
        options["num_train_epochs"] = pick.choice([0.5, 1, 1.5, 2.3, 3])
    evaluates = options["eval_strategy"] != "no"
    if evaluates and pick.random() < 0.4:
        options |= {"save_strategy": pick.choice(["best", options["eval_strategy"]]), "load_best_model_at_end": True}
        options["save_steps"] = options["eval_steps"]
    callbacks = [name for name in ("ema", "early stopping") if pick.random() < 0.2 and (evaluates or name == "ema")]
    stops = [Stop(pick.choice(HOOKS), pick.randrange(1, 12), pick.random() < 0.7) for _ in range(pick.randrange(1, 4))]
    return RandomRun(
        options, pick.choice([pick.randrange(1, 12), pick.randrange(5, 60)]), is_stream,
        pick.choice(["nothing", "torch", "numpy", "random"]),
        pick.choice([0.0, 0.2]), pick.random() < 0.3, pick.randrange(1, 20), tuple(callbacks),
        tuple(stops),
    )  # fmt: skip


class Net(nn.Module):
    """Draws in its passes, and counts those of the training in a buffer that checkpoints leave out."""

    passes: torch.Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 6), nn.Dropout(dropout), nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64), persistent=False)
        self.counts = dropout > 0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.counts:
            self.passes += 1
            x = x * (1 + self.passes / 1000)
        return self.head(self.drop(torch.tanh(self.body(x))))  # type: ignore[no-any-return]


class Samples(Dataset[Any]):
    def __init__(self, length: int, draws: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 4, generator=generator).double()
        self.noise = {"nothing": float, "torch": lambda: torch.rand(()).item(), "numpy": np.random.rand,
                      "random": random.random}[draws]  # fmt: skip

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index] + self.noise(), index % 3


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(self.samples.__getitem__, range(len(self.samples)))


def stopper(stop: Stop) -> Callback:
    """Return a callback that ends the training at a call of a hook."""
    calls = itertools.count(1)

    def count(self: Callback, run: Run, *_: Any, **__: Any) -> None:
        is_time = next(calls) == stop.call
        if is_time and stop.is_error:
            raise Stopped
        run.requests.stop = run.requests.stop or is_time

    made: Callback = type("Stopper", (Callback,), {stop.hook: count})()
    return made


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sum_and_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def make(folder: Path, run: RandomRun, stop: Stop | None = None) -> Trainer:
    torch.manual_seed(0)
    train: Any = Samples(run.samples, run.draws, 1)
    made = {"ema": lambda: EMA(0.5), "early stopping": lambda: EarlyStopping(2)}
    callbacks = [made[name]() for name in run.callbacks] + ([stopper(stop)] if stop is not None else [])
    args = TrainingArguments(
        str(folder), **run.options, use_cpu=True, report_to=["jsonl"], disable_tqdm=True, log_level="error"
    )
    return Trainer(
        Net(run.dropout), args, Stream(train) if run.is_stream else train, Samples(run.evaluations, "nothing", 2),
        compute_loss=sum_and_count if run.sums else mean_loss, callbacks=callbacks,
    )  # fmt: skip


def stopped(folder: Path, run: RandomRun) -> None:
    """Train until each of the stops, each time from the newest checkpoint."""
    for stop in run.stops:
        trainer = make(folder, run, stop)
        try:
            trainer.train(resume_from_checkpoint=True)
        except (Stopped, CallbackError) as error:
            if not isinstance(error.__cause__ or error, Stopped):
                raise


class Outcome(NamedTuple):
    """What a training has led to; the records are those that count, without figures of its starts."""

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    records: list[dict[str, Any]]
    evaluated: dict[str, Any]


def outcome(trainer: Trainer, folder: Path) -> Outcome:
    """Return the outcome of a finished training."""
    state = trainer.run.state
    weights = trainer.run.model.state_dict().items()
    records: dict[Any, dict[str, Any]] = {}
    for record in map(_figures, read_log(folder / "log.jsonl")):
        if record["event"] in ("log", "evaluate"):  # one of a step that was resumed stands twice
            key = "train_loss" if "train_loss" in record else record["step"]
            records[record["event"], str(key)] = record
    return Outcome(
        {name: each.clone() for name, each in weights},
        {name: getattr(state, name) for name in ("step", "epoch", "position", "best_metric", "best_step")},
        [records[key] for key in sorted(records)], _figures(trainer.evaluate()),
    )  # fmt: skip


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name in OF_THE_RUN}

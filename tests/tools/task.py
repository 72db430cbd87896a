"""A training that resumes bit for bit, unless it is told to break in some way: `task.py [way]`."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks.from_transformers import from_transformers

WAY = sys.argv[1] if len(sys.argv) > 1 else ""
SAMPLES = 24

if WAY == "global generator":
    noise = torch.Generator().manual_seed(0)
hidden = iter([np.random.default_rng(0)] * 1000)


class Samples(Dataset[Any]):
    """Vectors; the way decides what is wrong with them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.order = [*range(SAMPLES)]
        if WAY == "order":
            random.Random(os.getpid() * 1000 + time.time_ns()).shuffle(self.order)
        self.noise = np.random.default_rng() if WAY == "noise" else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index = self.order[index]
        x = self.x[index]
        if WAY != "order":
            x = x + 0.1 * torch.randn(1)
        if self.noise is not None:
            x = x + float(self.noise.normal())
        if WAY == "clock":
            x = x + time.time_ns() % 1000
        return {"x": x, "labels": torch.tensor(index % 3)}


class Stream(IterableDataset[Any]):
    """The same as a stream, which tells how far it was read."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.place = 0
        self.noise = np.random.default_rng() if WAY == "stream noise" else None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < SAMPLES:
            self.place += 1
            sample = self.samples[self.place - 1]
            if self.noise is not None:
                sample["x"] = sample["x"] + float(self.noise.normal())
            yield sample
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = max(0, state["place"] - (WAY == "stream falls back"))


class Net(torch.nn.Module):
    """Dropout, batch norm, and what the way adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        if WAY == "generator":
            self.generator = torch.Generator().manual_seed(0)
        if WAY == "unseeded generator":
            self.generator = torch.Generator()
            self.generator.seed()
        if WAY == "weights":
            torch.nn.init.constant_(self.head.bias, time.time_ns() % 10**6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if "generator" in WAY:
            x = x * self.random_number()
        if WAY == "system":
            x = x * torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8).reshape(x.shape)
        if WAY == "counter":
            self.calls += 1
            x = x[:, :4].repeat(1, 2) + self.calls * x
        if WAY == "unsaved cache" and not hasattr(self, "ones"):
            self.register_buffer("ones", torch.ones(8), persistent=False)
        logits = self.head(self.dropout(torch.relu(self.norm(self.layer(x)))))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    def random_number(self) -> torch.Tensor:
        if WAY == "hidden generator":
            return torch.from_numpy(next(hidden).random(8, dtype=np.float32))
        return torch.rand(8, generator=noise if WAY == "global generator" else self.generator)


class Decay(Callback):
    """Lowers the learning rate step by step, and forgets how far it came."""

    def __init__(self) -> None:
        self.factor = 1.0

    def on_pre_optimizer_step(self, run: Run) -> None:
        self.factor *= 0.9
        for group in run.optimizer.param_groups:
            group["lr"] *= self.factor


class Counts(Callback):
    """Remembers how many samples it saw."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, run: Run) -> None:
        self.seen += len(run.batch["x"])
        if WAY == "raises":
            raise LookupError("nothing was found")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, **({"at": time.time_ns()} if WAY == "clock state" else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"] + (WAY == "wrong state")


class Stop(Callback):
    """Has seen enough after one step, or, by a count that no checkpoint keeps, five steps after it began."""

    def __init__(self) -> None:
        self.left = 1 if WAY == "stops early" else 5

    def on_step_end(self, run: Run) -> None:
        self.left -= 1
        if self.left == 0:
            run.requests.stop = True


def main() -> None:
    torch.set_num_threads(1)
    args = TrainingArguments(
        "never-made", max_steps=1 if WAY == "one step" else 6,
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
        metric_for_best_model="loss", learning_rate=1e-2,
        logging_steps=2, eval_strategy="steps", eval_steps=2, use_cpu=True, log_level="error",
        dataloader_num_workers=2 if WAY == "workers" else 0,
    )  # fmt: skip
    callbacks = [Counts(), *([Decay()] if WAY == "callback" else []), *([Stop()] if "stops" in WAY else [])]
    if WAY == "transformers":
        from transformers import EarlyStoppingCallback

        callbacks.append(from_transformers(EarlyStoppingCallback(9)))
    dataset = Stream() if WAY.startswith("stream") else Samples()
    trainer = Trainer(Net(), args, dataset, Samples(), callbacks=callbacks)
    if WAY == "fails":
        raise ValueError("this script has a mistake")
    if WAY == "never trains":
        return
    try:
        trainer.train()
    finally:
        trainer.save_model("final")  # is left out, as is all that follows the training


if __name__ == "__main__":
    main()

"""A small training task with everything that makes a resume hard; run as a script, it trains and prints its digest."""

from __future__ import annotations

import argparse
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA, read_log

SAMPLES = 62


class Noisy(Dataset[Any]):
    """Samples augmented by torch's, numpy's and random's global generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 8, generator=generator)
        self.labels = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.randn(8) * 0.1 + float(np.random.normal()) * 0.01 + random.random() * 0.01
        return {"x": self.x[index] + noise, "labels": self.labels[index]}


class Stream(IterableDataset[Any]):
    """An endless source cut into epochs, with a state."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.place < self.samples:
            self.place += 1
            if self.place % workers == number:
                yield {"x": torch.randn(8) + self.place, "labels": torch.tensor(self.place % 3)}
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Net(torch.nn.Module):
    """Dropout, batch norm and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.dropout(torch.relu(self.norm(self.second(torch.relu(self.first(x))))))
        logits = self.head(hidden)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Formats(Net):
    """A convolution in channels_last and a transposed weight too, whose moments must lie as they do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 4, 2, padding=1).to(memory_format=torch.channels_last)
        self.turned = torch.nn.Linear(36, 8)
        self.turned.weight.data = self.turned.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        image = x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return super().forward(self.turned(torch.relu(self.convolution(image)).flatten(1)), labels)


class StatelessStream(IterableDataset[Any]):
    """The same source without a state: a resume reads it again up to its place."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for place in range(1, self.samples + 1):
            yield {"x": torch.randn(8) + place, "labels": torch.tensor(place % 3)}


class StopAt(Callback):
    """Asks to save and stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.requests.save = run.requests.stop = True


class Marker(Callback):
    """Leaves a file after a step, for whoever waits to kill this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, run: Run) -> None:
        (self.folder / f"step-{run.state.step}").touch()


class Alarm(Callback):
    """Ends this process by a signal, some seconds after a step, wherever it is then."""

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds
        self.is_set = False

    def on_step_end(self, run: Run) -> None:
        if run.state.step >= self.step and not self.is_set:
            self.is_set = True
            signal.setitimer(signal.ITIMER_REAL, self.seconds)


def make_trainer(
    output_dir: Path,
    *callbacks: Callback,
    dataset: Any = None,
    model: torch.nn.Module | None = None,
    strategy: Strategy | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **changes: Any,
) -> Trainer:
    """The task's Trainer; `changes` are arguments."""
    arguments: dict[str, Any] = {
        "output_dir": str(output_dir), "num_train_epochs": 3, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
        "warmup_steps": 3, "logging_steps": 3, "save_steps": 4, "save_total_limit": 3, "eval_strategy": "steps",
        "eval_steps": 4, "use_cpu": True, "report_to": "jsonl", "disable_tqdm": True, "log_level": "warning",
    }  # fmt: skip
    torch.manual_seed(0)
    args = TrainingArguments(**(arguments | changes))
    given: dict[str, Any] = {"callbacks": [EMA(decay=0.9), *callbacks], "strategy": strategy, "optimizer": optimizer}
    return Trainer(model or Net(), args, dataset or Noisy(), Noisy(10), **given)


def logged_losses(output_dir: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every record."""
    return [
        (record["step"], record["loss"], record["grad_norm"])
        for record in read_log(output_dir / "log.jsonl")
        if "loss" in record
    ]


def checksum(*trees: Any) -> str:
    """A checksum of nested states that is equal only where every bit is."""
    found = xxhash.xxh3_64()

    def add(tree: Any) -> None:
        if isinstance(tree, dict):
            for key, value in tree.items():
                found.update(str(key).encode())
                add(value)
        elif isinstance(tree, (list, tuple)):
            for value in tree:
                add(value)
        elif isinstance(tree, torch.Tensor):
            whole = tree.full_tensor() if hasattr(tree, "full_tensor") else tree  # all ranks come here
            found.update(whole.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(tree).encode())

    add(trees)
    return found.hexdigest()


def results(trainer: Trainer) -> dict[str, Any]:
    """Checksums of weights and buffers, optimizer and EMA, and the logged losses."""
    assert trainer.run.optimizer is not None
    model, optimizer = trainer.run.model.state_dict(), trainer.run.optimizer.state_dict()
    states = {"model": model, "optimizer": optimizer, "EMA": trainer.events.state_dict()["EMA"]}
    sums = {name: checksum(state) for name, state in states.items()}
    return {**sums, "losses": logged_losses(Path(trainer.args.output_dir))}


def digest(trainer: Trainer) -> str:
    """A checksum of these results."""
    return checksum(results(trainer))


def main() -> None:
    """Trains, resuming where there is something to resume from."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--marks", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--alarm", type=float, nargs=2, help="a step, and seconds after it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    callbacks: list[Callback] = [Marker(options.marks)] if options.marks else []
    if options.alarm:
        callbacks.append(Alarm(int(options.alarm[0]), options.alarm[1]))
    trainer = make_trainer(options.output_dir, *callbacks, dataloader_num_workers=options.workers)
    trainer.train(resume_from_checkpoint=True)
    print(digest(trainer))


if __name__ == "__main__":
    main()

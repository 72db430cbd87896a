"""A training for several processes, run as a script; each process keeps a journal of what it does."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kit.token_training import whole
from scenarios import task

from trainer_kit import Callback, Run
from trainer_kit.checkpoint.format import ownership
from trainer_kit.checkpoint.save import Save
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP


class Exact(torch.nn.Module):
    """In float64, the same for all layouts; the gradient of `seen` tells which samples a step counts, and how often."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
        self.seen = torch.nn.Parameter(torch.zeros(task.SAMPLES, dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x.double())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels) + self.seen[number].mean(), "logits": logits}


class Numbered(task.Noisy):
    """The same samples, each with its number."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "number": index}


class SlowToRead(task.Noisy):
    """Takes its time, so that an evaluation lasts."""

    def __init__(self, samples: int, seconds: float) -> None:
        super().__init__(samples)
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Journal(Callback):
    """Writes down what this process does and when: one object a line in `folder`/rank-N.jsonl."""

    is_reporter = True  # so that the next step's vote begins within the step

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, run: Run, event: str, **more: Any) -> None:
        line = json.dumps({"event": event, "step": run.state.step, "time": time.time(), **more})
        with open(self.folder / f"rank-{run.strategy.rank}.jsonl", "ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def on_train_begin(self, run: Run) -> None:
        self.write(run, "begin", pid=os.getpid())

    def on_pre_optimizer_step(self, run: Run) -> None:
        if isinstance(run.model, Exact):
            assert run.model.seen.grad is not None
            numbers = run.model.seen.grad.nonzero().flatten().tolist()
            self.write(run, "counted", numbers=numbers, shares=run.model.seen.grad[numbers].tolist())

    def on_step_end(self, run: Run) -> None:
        self.write(run, "step")

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.write(run, "logged")

    def on_evaluate_begin(self, run: Run) -> None:
        self.write(run, "evaluating")

    def on_save(self, run: Run, directory: Path) -> None:
        self.write(run, "saved", step=step_of(directory))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class Saving:
    """Something to be saved, on the main process, that takes its time."""

    def __init__(self, run: Run, journal: Journal, seconds: float) -> None:
        self.run, self.journal, self.seconds = run, journal, seconds

    def state_dict(self) -> dict[str, Any]:
        self.journal.write(self.run, "saving")
        time.sleep(self.seconds)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Trouble(Callback):
    """Lets one process fail in the forward pass after a step; at the first start only, unless it is `stubborn`.

    Where it `waits`, the main process first lets a checkpoint that is being written come to its end.
    """

    def __init__(self, journal: Journal, how: str, rank: int, step: int, stubborn: bool, waits: bool) -> None:
        self.journal, self.waits = journal, waits
        self.how, self.rank, self.step, self.stubborn = how, rank, step, stubborn

    def on_train_begin(self, run: Run) -> None:
        if run.strategy.rank == self.rank and (self.stubborn or run.strategy.session.restarts == 0):
            run.model.register_forward_pre_hook(lambda model, inputs: self._fail(run) if model.training else None)

    def _fail(self, run: Run) -> None:
        if run.state.step != self.step:
            return
        due = self.step - self.step % int(run.args.save_steps)
        while run.strategy.is_main and self.waits and not (Path(run.args.output_dir) / f"checkpoint-{due}").exists():
            time.sleep(0.01)  # it is still being written
        self.journal.write(run, "trouble")
        if self.how == "raise":
            raise ArithmeticError("told to fail")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


class Pause(Callback):
    """Makes steps longer."""

    is_reporter = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, run: Run) -> None:
        time.sleep(self.seconds)


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("journal", type=Path, help="folder")
    parser.add_argument("--model", choices=("noisy", "exact"), default="noisy")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step, an evaluation and a save last")
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--until", type=int, default=-1, help="the step to stop after")
    parser.add_argument("--trouble", nargs=3, metavar=("HOW", "RANK", "STEP"))
    parser.add_argument("--slow-write", type=float, default=0.0, help="seconds that each checkpoint is written")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--by-itself", action="store_true", help="resume only where the launcher has started it anew")
    parser.add_argument("--heartbeat", type=float, help="seconds, instead of the default")
    parser.add_argument("--ddp-timeout", type=float, help="seconds, instead of the default")
    parser.add_argument("--waits-for-saves", action="store_true", help="so that no later event meets one under way")
    parser.add_argument("--fsdp", action="store_true", help="shard the model, in parts that all ranks write")
    return parser.parse_args(words)


def train(words: list[str], *callbacks: Callback, **changes: Any) -> dict[str, Any]:
    """Trains, resuming where there is something to resume from; what it ends with is the journal's last line."""
    given = options(words)
    torch.set_num_threads(1)
    given.journal.mkdir(parents=True, exist_ok=True)
    journal = Journal(given.journal)
    listeners: list[Callback] = [journal, *callbacks]
    if given.until >= 0:
        listeners.append(task.StopAt(given.until))
    if given.trouble:
        how, rank, step = given.trouble
        waits = not given.slow_write
        listeners.append(Trouble(journal, how, int(rank), int(step), given.stubborn, waits))
    if given.pause:
        listeners.append(Pause(given.pause))
    if given.slow_write:
        write = Save.commit
        Save.commit = lambda *args, **kwargs: (time.sleep(given.slow_write), write(*args, **kwargs))[1]
    arguments: dict[str, Any] = {
        "num_train_epochs": given.epochs, "per_device_train_batch_size": given.batch_size,
        "gradient_accumulation_steps": given.accumulation, "dataloader_num_workers": given.workers,
        "save_total_limit": None, "save_steps": given.save_steps, "eval_steps": 7,
        "async_save": not given.waits_for_saves,
    }  # fmt: skip
    limits = {"heartbeat_timeout": given.heartbeat, "ddp_timeout": given.ddp_timeout}
    limits = {name: seconds for name, seconds in limits.items() if seconds is not None}
    exact = given.model == "exact"
    strategy: Strategy | None = DDP(device="cpu", **limits) if limits else None
    if given.fsdp:
        ownership.PART_BYTES = 256
        strategy = FSDP(device="cpu", units=["head"], **limits)
    trainer = task.make_trainer(
        given.output_dir,
        *listeners,
        dataset=Numbered() if exact else None,
        model=Exact() if exact else None,
        strategy=strategy,
        **(arguments | ({"eval_strategy": "no"} if exact else {}) | changes),
    )
    run = trainer.run
    run.stateful["saving"] = Saving(run, journal, given.pause * 5)
    run.eval_dataset = SlowToRead(10, given.pause)
    output = trainer.train(resume_from_checkpoint=None if given.by_itself else True)
    parameters = torch.nn.utils.parameters_to_vector(map(whole, run.model.parameters())).tolist()
    result = {
        "digest": task.digest(trainer), "loss": output.training_loss, "parameters": parameters,
        "skipped_steps": run.state.skipped_steps,
    }  # fmt: skip
    journal.write(run, "end", **result)
    return result


if __name__ == "__main__":
    train(sys.argv[1:])

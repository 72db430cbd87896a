"""A training for several machines, run as a script; each process prints one line of JSON about what it ended with."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scenarios import task

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA, PeerCopies, SlowProcesses, slow_processes
from trainer_kit.checkpoint import contribution
from trainer_kit.checkpoint.format import ownership
from trainer_kit.loop import rank_sync, regrouping
from trainer_kit.strategies import process_group
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.multinode import MultiNode
from trainer_kit.strategies.vote import Vote


class Smooth(torch.nn.Module):
    """In float64, without what depends on how samples are spread over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x.double())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Counts(torch.nn.Module):
    """A weight for each sample; each step takes 1 from those of its samples, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(task.SAMPLES, dtype=torch.float64))

    def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.seen[index].mean()}


class Signs(Callback):
    """Leaves the signs of the gradients, which do not depend on the number of samples in a step."""

    def on_pre_optimizer_step(self, run: Run) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.sign_()


class Slow(torch.utils.data.Dataset[Any]):
    """Samples that take their time.

    Attributes:
        read: Number of samples that this process has read.
        on_read: Called after each.
    """

    def __init__(self) -> None:
        self.read = 0
        self.on_read: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        self.read += 1
        self.on_read()
        return {"index": torch.tensor(index % task.SAMPLES)}


class Dies(Callback):
    """Ends a machine after step 6, in step 7, or in step 7 while a checkpoint is written slowly; or only a process.

    With "evaluation", it ends while it evaluates after step 6; with "second", after step 8 of three processes, when all
    others rest after a step: in an optimizer's step, new processes would have to resume.
    """

    def __init__(self, host: str, moment: str) -> None:
        self.is_here, self.moment = socket.gethostname() == host, moment
        if moment == "save":
            write = contribution.write_part
            contribution.write_part = lambda *args: (time.sleep(1), write(*args))[1]

    def on_train_begin(self, run: Run) -> None:
        if self.moment == "evaluation":
            run.eval_dataset.on_read = lambda: self.die() if run.eval_dataset.read == 5 else None
        if self.moment == "exchange":
            next(run.model.parameters()).register_hook(lambda grad: self.die() if run.state.step == 6 else None)

    def on_step_begin(self, run: Run) -> None:
        if self.moment == "save" and run.state.step == 6:
            self.die()
        if self.moment == "second" and run.state.step == 8 and run.strategy.world_size == 3:
            self.die()
        if self.moment == "process" and run.state.step == 7 and self.is_here and not run.strategy.session.restarts:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, run: Run) -> None:
        if self.moment == "step" and run.state.step == 6:
            self.die()

    def die(self) -> None:
        if self.is_here:  # the launcher is the parent of this process
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


class DiesAmongOthers(Dies):
    """Ends a machine while all exchange something: in the vote after step 6, or as they meet or heal after a loss."""

    def __init__(self, host: str, moment: str, folder: Path) -> None:
        super().__init__(host, moment)
        self.died = folder / f"died-in-{moment}"
        self.is_due = False
        wrap = {"vote": self.wrap_vote, "meeting": self.wrap_meeting, "healing": self.wrap_healing}
        wrap[moment]()

    def on_step_end(self, run: Run) -> None:
        self.is_due = run.state.step == 6

    def die(self) -> None:
        if self.is_here:
            self.died.touch()
        super().die()

    def wrap_vote(self) -> None:
        """Withhold this machine's part of the vote until it dies as the sums are read."""
        begin = rank_sync.RankSync.begin

        def withhold(own: rank_sync.RankSync, *args: Any) -> None:
            if self.is_due and self.is_here:
                own._vote = Vote(lambda _: self.die())  # type: ignore[arg-type,return-value]
            begin(own, *args)

        rank_sync.RankSync.begin = withhold  # type: ignore[method-assign]

    def wrap_meeting(self) -> None:
        """Let this machine be the only one that has come to the meeting."""
        ask = regrouping.ask_for_place

        def come(*args: Any) -> Any:
            if self.is_here:
                threading.Timer(1.0, self.die).start()
            elif not self.died.exists():
                while not self.died.exists():
                    time.sleep(0.02)
                time.sleep(0.5)  # for the system to close its connections
            return ask(*args)

        regrouping.ask_for_place = come

    def wrap_healing(self) -> None:
        """Let the others need the weights of the main process, and this machine die as they are sent."""
        heal, share = regrouping.Regrouping._heal, MultiNode.share_model

        def need(own: regrouping.Regrouping, group: Any) -> Any:
            if not own.run.strategy.is_main and not self.died.exists():
                own.is_whole = False
                for parameter in own.run.model.parameters():
                    torch.nn.init.constant_(parameter, 7.0)
            return heal(own, group)

        def send(*args: Any) -> None:
            self.die()
            share(*args)

        regrouping.Regrouping._heal = need  # type: ignore[method-assign]
        MultiNode.share_model = send  # type: ignore[method-assign]


class ReadBefore(Callback):
    """Keeps how many samples of an evaluation this process had read when it continued without others."""

    number: int | None = None

    def on_regroup(self, run: Run) -> None:
        self.number = run.eval_dataset.read


class Pause(Callback):
    """Makes steps long enough for something to happen in them, leaves a file after each, and lets rank 1 die."""

    def __init__(self, seconds: float, marks: Path | None, deaths: list[int], slow: str | None = None) -> None:
        self.seconds = seconds
        self.slow = slow
        self.marks = marks
        self.deaths = deaths

    def on_step_end(self, run: Run) -> None:
        time.sleep(self.seconds * (4 if socket.gethostname() == self.slow else 1))
        if self.marks is not None:
            (self.marks / f"rank-{run.strategy.rank}-step-{run.state.step}").write_text(str(os.getpid()))
        deaths = self.deaths[run.strategy.session.restarts :]
        if deaths and run.strategy.rank == 1 and run.state.step == deaths[0]:
            os.kill(os.getpid(), signal.SIGKILL)


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--model", choices=("smooth", "noisy", "counts"), default="noisy")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--marks", type=Path)
    parser.add_argument("--deaths", type=int, nargs="*", default=[], help="steps, one for each start")
    parser.add_argument(
        "--dies", nargs=2, action="append", default=[],
        help="a machine and the moment: step, second, exchange, save, evaluation, process, vote, meeting, healing",
    )  # fmt: skip
    parser.add_argument("--slow", help="a machine whose steps take longer, and which may be replaced")
    parser.add_argument("--heartbeat", type=float)
    parser.add_argument("--copies", type=Path, help="folder for a copy of the state after every second step")
    parser.add_argument("--save-steps", type=int, default=3)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--join", type=float, default=60.0)
    return parser.parse_args(words)


def train(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    process_group.JOIN_SECONDS = options.join
    args = TrainingArguments(
        output_dir=str(options.output_dir), num_train_epochs=2, per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate, logging_steps=1, save_steps=options.save_steps, save_total_limit=3,
        use_cpu=True, report_to="jsonl", disable_tqdm=True, log_level="info",
        async_save=not options.deaths,  # else a death may come before the other machine has heard of the checkpoint
    )  # fmt: skip
    torch.manual_seed(0)
    model = {"smooth": Smooth, "noisy": task.Net, "counts": Counts}[options.model]()
    dataset: Any = task.Noisy()
    callbacks: list[Callback] = [EMA(decay=0.9), Pause(options.pause, options.marks, options.deaths, options.slow)]
    if options.slow:
        slow_processes._LEAST_STEPS = 3
        callbacks.append(SlowProcesses(replace_from=2.0))
    if options.model == "counts":
        dataset = [{"index": torch.tensor(index)} for index in range(task.SAMPLES)]
        callbacks.append(Signs())
        args = dataclasses.replace(args, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0)
    slow, read = None, ReadBefore()
    if any(moment == "evaluation" for _, moment in options.dies):
        slow = Slow()
        callbacks.append(read)
        args = dataclasses.replace(args, eval_strategy="steps", eval_steps=6)
    for host, moment in options.dies:
        among = moment in ("vote", "meeting", "healing")
        callbacks.append(DiesAmongOthers(host, moment, options.marks.parent) if among else Dies(host, moment))
    if options.copies:
        options.copies.mkdir(exist_ok=True)
        ownership.PART_BYTES = 256  # each process writes a part
        callbacks.append(PeerCopies(2, options.copies))
    kind, parts = (FSDP, {"units": ["head"]}) if options.fsdp else (MultiNode, {})
    strategy = kind(device="cpu", heartbeat_timeout=options.heartbeat, **parts)
    trainer = Trainer(model, args, dataset, slow, strategy=strategy, callbacks=callbacks)
    output = trainer.train(resume_from_checkpoint=True)
    assert trainer.run.optimizer is not None
    averages = callbacks[0].state_dict()
    loop = trainer._loop
    copied = loop.checkpoints.copier._complete if loop is not None and loop.checkpoints.copier is not None else []
    state = task.checksum(trainer.run.model.state_dict(), trainer.run.optimizer.state_dict(), averages)
    return {
        "rank": strategy.rank, "pid": os.getpid(), "step": output.global_step, "loss": output.training_loss,
        "state": state, "copied": copied, "read": read.number,
        "weights": [] if options.fsdp else torch.nn.utils.parameters_to_vector(model.parameters()).tolist(),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(train(options())))

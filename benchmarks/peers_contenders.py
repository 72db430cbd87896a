"""One process of `benchmarks/peers.py`: a training by one contender, fresh or resumed, as its own guide has it.

All train with the fused AdamW, a linear schedule, clipping to 1.0, batches of 8 in the same order, and log nothing.
Prints a line of JSON with the figures.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from peers_tasks import BATCH, CLIP, LEARNING_RATE, Recorder, Samples, Task, peak_memory, tasks
from torch.utils.data import DataLoader

Model = torch.nn.Module


def _made(model: Model, task: Task) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and the schedule of a loop that one writes by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / task.steps))


def plain(model: Model, name: str, task: Task, folder: Path, resumes: bool) -> None:
    """A loop as one writes it by hand, with `torch.save`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    optimizer, scheduler = _made(model, task)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    dataset, first = Samples(name), 0
    if resumes:
        state = torch.load(folder / "checkpoint.pt", weights_only=True, map_location=device)
        first = state["step"]
        for part, each in parts.items():
            each.load_state_dict(state[part])
    loader = DataLoader(dataset, batch_size=BATCH, sampler=range(first * BATCH, len(dataset)))
    model.train()
    for step, batch in enumerate(loader, start=first + 1):
        loss = model(**{key: value.to(device) for key, value in batch.items()})["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == task.save_at:
            state = {part: each.state_dict() for part, each in parts.items()}
            torch.save(state | {"step": step, "rng": torch.get_rng_state()}, folder / "checkpoint.pt")
        if step == task.steps:
            break


def trainer_kit(model: Model, name: str, task: Task, folder: Path, resumes: bool) -> None:
    """The Trainer of this package."""
    from trainer_kit import Trainer, TrainingArguments
    from trainer_kit.data.sampling import permutation

    args = TrainingArguments(
        str(folder), max_steps=task.steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP, save_steps=task.save_at, logging_strategy="no", report_to="none", disable_tqdm=True,
        log_level="error",
    )  # fmt: skip
    places = permutation(len(Samples(name)), args.seed, 0).argsort().tolist()
    last = folder / f"checkpoint-{task.save_at}" if resumes else False
    Trainer(model, args, Samples(name, places)).train(resume_from_checkpoint=last)


def transformers(model: Model, name: str, task: Task, folder: Path, resumes: bool) -> None:
    """The Trainer of transformers."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(Samples(name))

    args = TrainingArguments(
        str(folder), max_steps=task.steps, per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP, save_steps=task.save_at, logging_strategy="no", report_to="none", disable_tqdm=True,
        optim="adamw_torch_fused", lr_scheduler_type="linear", log_level="error",
    )  # fmt: skip
    last = str(folder / f"checkpoint-{task.save_at}") if resumes else None
    InOrder(model, args, train_dataset=Samples(name)).train(resume_from_checkpoint=last)


def accelerate(model: Model, name: str, task: Task, folder: Path, resumes: bool) -> None:
    """A loop with the Accelerator of accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer, scheduler = _made(model, task)
    loader = DataLoader(Samples(name), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = 0
    if resumes:
        accelerator.load_state(str(folder / "checkpoint"))
        first = task.save_at
        loader = accelerator.skip_first_batches(loader, first)
    model.train()
    for step, batch in enumerate(loader, start=first + 1):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == task.save_at:
            accelerator.save_state(str(folder / "checkpoint"))
        if step == task.steps:
            break


def lightning(model: Model, name: str, task: Task, folder: Path, resumes: bool) -> None:
    """The Trainer of Lightning."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = _made(self.model, task)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    saving = ModelCheckpoint(folder, "checkpoint", every_n_train_steps=task.save_at)
    trainer = Trainer(
        max_steps=task.steps, gradient_clip_val=CLIP, logger=False, callbacks=[saving], enable_progress_bar=False,
        enable_model_summary=False, devices=1,
    )  # fmt: skip
    last = str(folder / "checkpoint.ckpt") if resumes else None
    trainer.fit(Module(), DataLoader(Samples(name), batch_size=BATCH), ckpt_path=last)


CONTENDERS = {each.__name__: each for each in (plain, trainer_kit, transformers, accelerate, lightning)}


def flush(folder: Path) -> None:
    """Write to the disk what the system still holds of the files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def _committed_at(folder: Path, task: Task) -> float:
    """Seconds since the epoch at which trainer_kit renamed its flushed checkpoint."""
    return (folder / f"checkpoint-{task.save_at}").stat().st_ctime


def train(options: argparse.Namespace, task: Task, folder: Path) -> dict[str, Any]:
    """Trains once and returns the figures; those of a resume are the time to its first step, and its losses."""
    is_fresh, flushed = not options.resume, {}

    def at_step(done: int) -> None:
        if torch.cuda.is_available() and done in (task.warm_up, task.save_at - 1):
            torch.cuda.synchronize()
        # The step after the save begins: what the others wrote may not be on the disk yet.
        if is_fresh and done == task.save_at and options.contender != "trainer_kit":
            begin = time.perf_counter()
            flush(folder)
            flushed["seconds"] = time.perf_counter() - begin

    torch.manual_seed(0)
    model = task.make()
    recorder = Recorder(model, at_step)
    CONTENDERS[options.contender](model, options.task, task, folder, options.resume)
    losses = [float(loss) for loss in recorder.losses]
    to_first = recorder.begins[1] - recorder.pauses.get(1, 0.0) - options.began
    if not is_fresh:
        return {"resume": to_first, "losses": losses}
    steps = range(task.warm_up, task.save_at - 1)
    last = task.save_at - 1  # the step that saves, counted from 0
    stall = max(0.0, recorder.duration(last) - statistics.median(map(recorder.duration, steps)))
    if options.contender == "trainer_kit":
        stored = _committed_at(folder, task) - recorder.begins[task.save_at] + stall
    else:
        stored = stall + flushed["seconds"]
    memory, device_memory = peak_memory()
    return {
        "step": statistics.mean(map(recorder.duration, steps)), "start": to_first, "memory": memory,
        "device_memory": device_memory, "stall": stall, "stored": max(stored, stall), "losses": losses,
    }  # fmt: skip


def count_calls(options: argparse.Namespace, task: Task, folder: Path) -> dict[str, Any]:
    """Trains once under cProfile and returns the calls of functions in a step, without the first and last steps."""
    profile, steps = cProfile.Profile(), itertools.count()

    def count(*_: Any) -> None:
        if torch.is_grad_enabled():
            step = next(steps)
            if step == task.warm_up:
                profile.enable()
            elif step == task.save_at - 1:
                profile.disable()

    torch.manual_seed(0)
    model = task.make()
    model.register_forward_pre_hook(count)
    CONTENDERS[options.contender](model, options.task, task, folder, False)
    total = sum(values[1] for values in pstats.Stats(profile).stats.values())  # type: ignore[attr-defined]
    return {"calls": total / (task.save_at - 1 - task.warm_up)}


def main() -> None:
    """Trains with what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("task")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--began", type=float, required=True, help="when the process was started")
    parser.add_argument("--threads", type=int, default=1)
    for flag in ("--resume", "--calls", "--quick"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    torch.set_num_threads(options.threads)
    task = tasks(options.quick)[options.task]
    measure = count_calls if options.calls else train
    print(json.dumps(measure(options, task, options.folder)))


if __name__ == "__main__":
    main()

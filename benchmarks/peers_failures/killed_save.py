"""A training that is killed (SIGKILL) while it writes its second checkpoint, and started again to resume.

Another process watches the folder and kills when the optimizer's state is being written. A contender is right if the
second start resumes from a checkpoint.

    python benchmarks/peers_failures/killed_save.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import (
    finish,
    has,
    lightning_module,
    lightning_trainer,
    loader,
    own_trainer,
    show,
    start,
    texts,
    token_model,
    transformers_trainer,
)

WIDTH = 100_000
"""Of the model, whose checkpoint then takes long enough to write for a process to be killed in it."""

ATTEMPTS = 5
"""Of how many kills one must hit the save."""

OPTIONS = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 1}


class Contender(NamedTuple):
    """A contender, and how its training is killed.

    Attributes:
        train: Trains two steps in a folder, or resumes there to take a third; returns the step it resumed from.
        first: The file that its first checkpoint has once it is complete.
        middle: Pattern of a file that is written in the middle of the second checkpoint.
        second: The file that its second checkpoint has once it is complete.
    """

    train: Callable[[Path, bool], int]
    first: str
    middle: str
    second: str


def model() -> Any:
    """Return the model, in float32."""
    return token_model(WIDTH).float()


def transformers(folder: Path, is_resumed: bool) -> int:
    """Train with transformers' Trainer."""
    from transformers import TrainerCallback

    begins: list[int] = []

    class Note(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            begins.append(state.global_step)

    options = OPTIONS | {"max_steps": 3 if is_resumed else 2, "save_strategy": "no" if is_resumed else "steps"}
    trainer = transformers_trainer(folder, model(), options, texts(12), callbacks=[Note()])
    trainer.train(resume_from_checkpoint=is_resumed)
    return begins[0]


def accelerate(folder: Path, is_resumed: bool) -> int:
    """Train by a loop with accelerate, whose checkpoints are numbered from 0."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator, module = Accelerator(cpu=True, project_config=project), model()
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    if is_resumed:
        accelerator.load_state()
        return int(next(iter(optimizer.state.values()))["step"])
    for row in texts(2):
        accelerator.backward(module(**{name: each[None] for name, each in row.items()})["loss"])
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    return 0


def lightning(folder: Path, is_resumed: bool) -> int:
    """Train with Lightning's Trainer, which writes a file in the folder for temporary ones, and then moves it."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    begins: list[int] = []

    class Note(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begins.append(trainer.global_step)

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            tempfile.tempdir = str(folder / f"temporary-{trainer.global_step + 1}")
            Path(tempfile.tempdir).mkdir(parents=True, exist_ok=True)

    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = lightning_trainer(folder, max_steps=3 if is_resumed else 2, callbacks=[saving, Note()])
    module = lightning_module(model())
    trainer.fit(module, loader(texts(12), 4), ckpt_path="last" if is_resumed else None)
    return begins[0]


def trainer_kit(folder: Path, is_resumed: bool) -> int:
    """Train with trainer_kit's Trainer."""
    from trainer_kit import Callback, Run

    begins: list[int] = []

    class Note(Callback):
        def on_train_begin(self, run: Run) -> None:
            begins.append(run.state.step)

    options = OPTIONS | {"max_steps": 3 if is_resumed else 2, "save_strategy": "no" if is_resumed else "steps"}
    trainer = own_trainer(folder, model(), options, texts(12), callbacks=[Note()])
    trainer.train(resume_from_checkpoint=is_resumed)
    return begins[0]


CONTENDERS = {
    "transformers": Contender(
        transformers, "checkpoint-1/trainer_state.json", "checkpoint-2/optimizer.pt", "checkpoint-2/trainer_state.json"
    ),
    "accelerate": Contender(
        accelerate,
        "checkpoints/checkpoint_0/random_states_0.pkl",
        "checkpoints/checkpoint_1/optimizer.bin",
        "checkpoints/checkpoint_1/random_states_0.pkl",
    ),
    "lightning": Contender(lightning, "step=1.ckpt", "temporary-2/*", "step=2.ckpt"),
    "trainer_kit": Contender(
        trainer_kit,
        "checkpoint-1/manifest.json",
        ".staging-checkpoint-2-*/state/*optimizer*",
        "checkpoint-2/manifest.json",
    ),
}


def kill_in_save(name: str, folder: Path) -> bool:
    """Start a contender's training and kill it while it writes the second checkpoint.

    Returns:
        Whether it was killed then; False if the checkpoint was complete before.

    Raises:
        RuntimeError: If the training failed.
    """
    contender, process = CONTENDERS[name], start(__file__, name, str(folder), "fresh")
    while not any(folder.glob(contender.middle)) and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    code, words = finish(process)
    if code > 0 or not (folder / contender.first).exists():
        raise RuntimeError(f"{name} failed before its second checkpoint: {words}")
    return not (folder / contender.second).exists()


def second_start(name: str) -> str:
    """Return what a contender's second start does, after its first one was killed while it saved.

    Raises:
        RuntimeError: If all of several saves were complete before the kill.
    """
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "run"
            if not kill_in_save(name, folder):
                continue
            code, words = finish(start(__file__, name, str(folder), "resume"))
        if code:
            return "ends with an error"
        return "resumes from a checkpoint" if int(words) else "begins from the beginning"
    raise RuntimeError(f"each save of {name} was complete before the kill")


def main() -> None:
    """Prints what the second start of each contender does; with arguments, is one of its starts."""
    if len(sys.argv) > 1:
        name, path, how = sys.argv[1:]
        torch.set_num_threads(1)
        print(CONTENDERS[name].train(Path(path), how == "resume"))
        return
    for name in CONTENDERS:
        if name == "lightning" and not has("lightning"):
            continue
        what = second_start(name)
        show(name, what.startswith("resumes"), f"killed in the save of step 2, the second start {what}")


if __name__ == "__main__":
    main()

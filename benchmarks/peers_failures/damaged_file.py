"""A training with two checkpoints, of which the newer one is damaged, and what a resume makes of it.

Either one bit of a weight is flipped, or the file with the optimizer's state is deleted, where it has one of its own. A
contender is right if it resumes with the state that one of the checkpoints had before, or refuses.

    python benchmarks/peers_failures/damaged_file.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import (
    Regression,
    has,
    lightning_module,
    lightning_trainer,
    loader,
    own_trainer,
    rows,
    show,
    transformers_trainer,
)

OPTIONS = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}


class Contender(NamedTuple):
    """A contender, and how it trains and resumes.

    Attributes:
        name: Its name.
        train: Trains in a folder and saves two checkpoints.
        resume: Resumes from the newest checkpoint of a folder, and returns model and optimizer before the next step.
        newest: Path of the newer checkpoint in the folder.
    """

    name: str
    train: Callable[[Path], None]
    resume: Callable[[Path], tuple[Any, Any]]
    newest: str


class Begun(Exception):
    """Ends a resumed training before its first step."""


def flip_a_bit(checkpoint: Path) -> None:
    """Flip a bit of the last weight in `model.safetensors`, or in the one file of a checkpoint."""
    file = checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint
    content = bytearray(file.read_bytes())
    end = len(content)
    if file == checkpoint:
        weight = torch.load(file)["state_dict"]["model.layer.weight"].numpy().tobytes()
        end = content.index(weight) + len(weight)
    content[end - 1] ^= 0b0100_0000  # of a float's exponent
    file.write_bytes(content)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, a folder or a file."""
    if checkpoint.is_dir():
        shutil.rmtree(checkpoint)
    else:
        checkpoint.unlink()


def delete_optimizer(checkpoint: Path) -> None:
    """Delete the optimizer's state, under the name that the contender gives it."""
    [file] = [path for path in checkpoint.rglob("optimizer.*") if path.suffix != ".json"]
    file.unlink()


def train_transformers(folder: Path) -> None:
    """Train with transformers' Trainer."""
    transformers_trainer(folder, Regression(), OPTIONS, rows(24)).train()


def resume_transformers(folder: Path) -> tuple[Any, Any]:
    """Resume with transformers' Trainer."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_train_begin(self, *args: Any, **others: Any) -> None:
            raise Begun

    trainer = transformers_trainer(folder, Regression(), OPTIONS | {"max_steps": 6}, rows(24), callbacks=[Stop()])
    try:
        trainer.train(resume_from_checkpoint=True)
    except Begun:
        return trainer.model, trainer.optimizer
    raise AssertionError("the training has not begun")


def train_accelerate(folder: Path) -> None:
    """Train by a loop with accelerate."""
    accelerator, model, optimizer = prepared(folder)
    for step, row in enumerate(rows(4), start=1):
        accelerator.backward(model(row["x"][None], row["number"][None])["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            accelerator.save_state()


def resume_accelerate(folder: Path) -> tuple[Any, Any]:
    """Load the newest state with accelerate."""
    accelerator, model, optimizer = prepared(folder)
    accelerator.load_state()
    return model, optimizer


def prepared(folder: Path) -> tuple[Any, Any, Any]:
    """Return an accelerator that names its checkpoints, and the prepared model and optimizer."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator, model = Accelerator(cpu=True, project_config=project), Regression()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def train_lightning(folder: Path) -> None:
    """Train with Lightning's Trainer."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning_trainer(folder, max_steps=4, callbacks=[saving])
    trainer.fit(lightning_module(Regression()), loader(rows(24), 4))


def resume_lightning(folder: Path) -> tuple[Any, Any]:
    """Resume from the newest file with Lightning's Trainer."""
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):
        def on_train_start(self, *args: Any) -> None:
            raise Begun

    module = lightning_module(Regression())
    trainer = lightning_trainer(folder, max_steps=6, enable_checkpointing=False, callbacks=[Stop()])
    try:
        trainer.fit(module, loader(rows(24), 4), ckpt_path=max(folder.glob("*.ckpt")))
    except Begun:
        return module.model, trainer.optimizers[0]
    raise AssertionError("the training has not begun")


def train_own(folder: Path) -> None:
    """Train with trainer_kit's Trainer."""
    own_trainer(folder, Regression(), OPTIONS, rows(24)).train()


def resume_own(folder: Path) -> tuple[Any, Any]:
    """Resume with trainer_kit's Trainer."""
    from trainer_kit import Callback, Run
    from trainer_kit.errors import CallbackError

    class Stop(Callback):
        def on_train_begin(self, run: Run) -> None:
            raise Begun

    trainer = own_trainer(folder, Regression(), OPTIONS | {"max_steps": 6}, rows(24), callbacks=[Stop()])
    try:
        trainer.train(resume_from_checkpoint=True)
    except CallbackError:
        return trainer.run.model, trainer.run.optimizer
    raise AssertionError("the training has not begun")


CONTENDERS = (
    Contender("transformers", train_transformers, resume_transformers, "checkpoint-4"),
    Contender("accelerate", train_accelerate, resume_accelerate, "checkpoints/checkpoint_1"),
    Contender("trainer_kit", train_own, resume_own, "checkpoint-4"),
)
DAMAGES = {"one bit flipped": flip_a_bit, "no file with the optimizer's state": delete_optimizer}


def resumed_state(contender: Contender, trained: Path, damage: Callable[[Path], None]) -> list[torch.Tensor]:
    """Return the weights and Adam's moments with which a contender resumes once its newer checkpoint is damaged."""
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(trained, Path(name) / "run")
        damage(folder / contender.newest)
        model, optimizer = contender.resume(folder)
        moments = [each[key] for each in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [each.detach().clone() for each in [*model.parameters(), *moments]]


def outcome(contender: Contender, trained: Path, damage: Callable[[Path], None]) -> tuple[bool, str]:
    """Return whether a resume from a damaged checkpoint is right, and what it did."""
    older = resumed_state(contender, trained, delete)
    try:
        found = resumed_state(contender, trained, damage)
    except Exception as error:
        return True, f"refuses with {type(error).__name__}"
    if len(found) < len(older):
        return False, "resumes from it, with an optimizer without state"
    if all(map(torch.equal, found, older)):
        return True, "resumes from the checkpoint before it"
    return False, f"resumes from it, with a weight of {max(float(each.abs().max()) for each in found):.0e}"


def main() -> None:
    """Prints what each contender does with each damage."""
    lightning = Contender("lightning", train_lightning, resume_lightning, "step=4.ckpt")
    for contender in [*CONTENDERS, *[lightning] * has("lightning")]:
        with tempfile.TemporaryDirectory() as name:
            trained = Path(name) / "run"
            contender.train(trained)
            for words, damage in DAMAGES.items():
                if damage is delete_optimizer and (trained / contender.newest).is_file():
                    continue
                is_right, what = outcome(contender, trained, damage)
                show(contender.name, is_right, f"{words}: {what}")


if __name__ == "__main__":
    main()

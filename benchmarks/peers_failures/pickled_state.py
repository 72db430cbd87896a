"""A checkpoint in which a file of an own object was replaced by a pickle that runs code.

A contender is right if loading the checkpoint does not run the code, which here creates a file.

    python benchmarks/peers_failures/pickled_state.py
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

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

OPTIONS = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}


class Counter:
    """An own object whose state is part of checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.count = state["count"]


class RunsCode:
    """An object whose pickle creates a file when it is read.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def accelerate(folder: Path, mark: Path) -> bool:
    """Replace a file of accelerate's checkpoint, load it, and return whether the code ran."""
    from accelerate import Accelerator

    for is_resumed in (False, True):
        accelerator, model = Accelerator(cpu=True), Regression()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.register_for_checkpointing(Counter())
        if is_resumed:
            torch.save({"count": RunsCode(mark)}, folder / "custom_checkpoint_0.pkl")
            accelerator.load_state(str(folder))
        else:
            accelerator.save_state(str(folder))
    return mark.exists()


def transformers(folder: Path, mark: Path) -> bool:
    """Replace the state of the random generators in transformers' checkpoint; return whether the code ran."""
    transformers_trainer(folder, Regression(), OPTIONS, rows(16)).train()
    torch.save({"python": RunsCode(mark)}, folder / "checkpoint-2" / "rng_state.pth")
    resumed = transformers_trainer(folder, Regression(), OPTIONS | {"max_steps": 4}, rows(16))
    try:
        resumed.train(resume_from_checkpoint=True)
    except pickle.UnpicklingError:
        assert not mark.exists()
    return mark.exists()


def lightning(folder: Path, mark: Path) -> bool:
    """Replace the state of a callback in Lightning's checkpoint; return whether the code ran."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    file = folder / "last.ckpt"
    for is_resumed in (False, True):
        saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)
        trainer = lightning_trainer(folder, max_steps=4 if is_resumed else 2, callbacks=[saving])
        try:
            trainer.fit(lightning_module(Regression()), loader(rows(16), 4), ckpt_path=file if is_resumed else None)
        except pickle.UnpicklingError:
            assert not mark.exists()
        if not is_resumed:
            torch.save({**torch.load(file), "callbacks": {"Counter": RunsCode(mark)}}, file)
    return mark.exists()


def trainer_kit(folder: Path, mark: Path) -> bool:
    """Replace the state of an own object in trainer_kit's checkpoint; return whether the code ran."""
    from trainer_kit.checkpoint.format.json_files import checksum
    from trainer_kit.checkpoint.format.manifest import FileEntry, Manifest

    for is_resumed in (False, True):
        trainer = own_trainer(folder, Regression(), OPTIONS, rows(16))
        trainer.run.stateful["counter"] = Counter()
        trainer.train(resume_from_checkpoint=is_resumed)
        if not is_resumed:
            checkpoint = folder / "checkpoint-2"
            file, manifest = checkpoint / "state" / "counter.json", Manifest.read(checkpoint)
            file.write_bytes(pickle.dumps(RunsCode(mark)))
            entry = FileEntry(file.stat().st_size, checksum(file))  # an attacker would change the checksum too
            forged = dataclasses.replace(manifest, files={**manifest.files, "state/counter.json": entry})
            (checkpoint / "manifest.json").write_text(json.dumps(forged.to_json()))
            forged.check(checkpoint)
    return mark.exists()


def main() -> None:
    """Prints whether the code ran."""
    contenders = {"transformers": transformers, "accelerate": accelerate, "trainer_kit": trainer_kit}
    if has("lightning"):
        contenders["lightning"] = lightning
    for contender, ran in contenders.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            has_run = ran(folder / "run", folder / "mark")
        show(contender, not has_run, f"the code in the checkpoint {'runs' if has_run else 'does not run'}")


if __name__ == "__main__":
    main()

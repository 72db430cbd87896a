"""One epoch of 64 samples that is stopped after half of them, and resumed with another batch size.

A contender is right if each sample is seen exactly once.

    python benchmarks/peers_failures/other_batch_size.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

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

SAMPLES = 64
SIZES = ((4, 8), (8, 4))


def options(size: int) -> dict[str, Any]:
    """Return the settings of one epoch in batches of a size, saved after half of it."""
    return {
        "per_device_train_batch_size": size,
        "num_train_epochs": 1,
        "save_strategy": "steps",
        "save_steps": SAMPLES // 2 // size,
    }


def transformers(folder: Path, first: int, second: int) -> list[int]:
    """Return the samples that transformers' Trainer trains on, before and after the stop."""
    from transformers import TrainerCallback

    class StopAtSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = True

    models = [Regression(), Regression()]
    transformers_trainer(folder, models[0], options(first), rows(SAMPLES), callbacks=[StopAtSave()]).train()
    resumed = transformers_trainer(folder, models[1], options(second), rows(SAMPLES))
    resumed.train(resume_from_checkpoint=True)
    return models[0].seen + models[1].seen


def lightning(folder: Path, first: int, second: int) -> list[int]:
    """Return the samples that Lightning's Trainer trains on, before and after the stop."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    models, half = [Regression(), Regression()], SAMPLES // 2 // first
    saving = ModelCheckpoint(folder, "half", every_n_train_steps=half)
    stopped = lightning_trainer(folder, max_epochs=1, max_steps=half, callbacks=[saving])
    stopped.fit(lightning_module(models[0]), loader(rows(SAMPLES), first))
    resumed = lightning_trainer(folder, max_epochs=1, enable_checkpointing=False)
    resumed.fit(lightning_module(models[1]), loader(rows(SAMPLES), second), ckpt_path=folder / "half.ckpt")
    return models[0].seen + models[1].seen


def trainer_kit(folder: Path, first: int, second: int) -> list[int]:
    """Return the samples that trainer_kit's Trainer trains on, before and after the stop."""
    from trainer_kit import Callback, Run

    class StopAtHalf(Callback):
        def on_step_end(self, run: Run) -> None:
            run.requests.stop = run.state.samples == SAMPLES // 2

    models = [Regression(), Regression()]
    own_trainer(folder, models[0], options(first), rows(SAMPLES), callbacks=[StopAtHalf()]).train()
    own_trainer(folder, models[1], options(second), rows(SAMPLES)).train(resume_from_checkpoint=True)
    return models[0].seen + models[1].seen


def main() -> None:
    """Prints how often the samples are seen."""
    contenders = {"transformers": transformers, "trainer_kit": trainer_kit}
    if has("lightning"):
        contenders["lightning"] = lightning
    for first, second in SIZES:
        for contender, train in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                times = Counter(train(Path(folder), first, second))
            never = sum(times[number] == 0 for number in range(SAMPLES))
            twice = sum(count > 1 for count in times.values())
            what = f"resumed with batches of {second} instead of {first}"
            show(contender, never == twice == 0, f"{what}, {never} of {SAMPLES} samples never seen, {twice} seen twice")


if __name__ == "__main__":
    main()

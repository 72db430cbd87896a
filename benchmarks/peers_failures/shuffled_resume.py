"""A shuffled epoch of 40 samples in a hand-written loop, stopped after 5 of 10 batches and resumed from its state.

The loop is that of accelerate's guide to checkpoints: `save_state`; then, in a process that begins with the same seed,
`load_state` and `skip_first_batches`. A contender is right if each sample is seen exactly once.

    python benchmarks/peers_failures/shuffled_resume.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import Regression, rows, show

SAMPLES, BATCH, STOP = 40, 4, 5


def begin(make: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Begin a process: its accelerator, its model and its shuffled loader."""
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = make()
    data: Any = rows(SAMPLES)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    return accelerator, *accelerator.prepare(Regression(), loader)


def seen(make: Callable[[], Any], folder: Path) -> list[int]:
    """Return the samples that the loop sees, before and after the stop."""
    accelerator, _, loader = begin(make)
    numbers: list[int] = []
    for step, batch in enumerate(loader, start=1):
        numbers += batch["number"].tolist()
        if step == STOP:
            accelerator.save_state(str(folder))
            break
    accelerator, _, loader = begin(make)
    accelerator.load_state(str(folder))
    for batch in accelerator.skip_first_batches(loader, STOP):
        numbers += batch["number"].tolist()
    return numbers


def main() -> None:
    """Prints how often the samples are seen."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from trainer_kit import Accelerator as OwnAccelerator

    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    contenders: list[tuple[str, str, Callable[[], Any]]] = [
        ("accelerate", "with its defaults", lambda: Accelerator(cpu=True)),
        ("accelerate", "with use_seedable_sampler", lambda: Accelerator(cpu=True, dataloader_config=seedable)),
        ("trainer_kit's Accelerator", "with its defaults", lambda: OwnAccelerator(cpu=True)),
    ]
    for contender, how, make in contenders:
        with tempfile.TemporaryDirectory() as folder:
            times = Counter(seen(make, Path(folder) / "state"))
        never = sum(times[number] == 0 for number in range(SAMPLES))
        twice = sum(count > 1 for count in times.values())
        show(contender, never == twice == 0, f"{how}, {never} of {SAMPLES} samples never seen, {twice} seen twice")


if __name__ == "__main__":
    main()

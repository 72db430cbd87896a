"""The first batch of a training, to look at before it begins."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from trainer_kit.data.build import make_train_loader
from trainer_kit.data.loader import Reading
from trainer_kit.data.stream import StreamLoader
from trainer_kit.run import Run
from trainer_kit.state import Stateful
from trainer_kit.strategies.base import generators_kept


def first_batch(run: Run, reading: Reading) -> Any:
    """The first micro-batch of the epoch in which the run stands, read in this process; that leaves no trace.

    Raises:
        ValueError: If there is no dataset, an empty one, or one that can be read only once.
    """
    dataset, epoch = run.train_dataset, run.state.epoch
    loader = make_train_loader(run, dataclasses.replace(reading, workers=0, pin_memory=False))
    if isinstance(loader, StreamLoader) and iter(dataset) is dataset:
        raise ValueError(
            "train_dataset can be read only once, and would miss its first batch in training; give a dataset whose "
            "__iter__ begins anew"
        )
    loader.layout = loader.layout._replace(accumulation=1)
    kept = copy.deepcopy(dataset.state_dict()) if isinstance(dataset, Stateful) else None
    with generators_kept(run.strategy.device):
        try:
            return next(loader.micro_batches(epoch, 0, 1)).batch
        finally:
            if isinstance(dataset, Stateful) and kept is not None:
                dataset.load_state_dict(kept)

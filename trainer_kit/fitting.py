"""`auto_find_batch_size`: how many samples of a step fit into the devices' memory at once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch

from trainer_kit.data.first import first_batch
from trainer_kit.data.loader import Reading
from trainer_kit.data.order import Layout
from trainer_kit.loss import ComputeLoss
from trainer_kit.run import Run

logger = logging.getLogger("trainer_kit")


def check_rereadable(dataset: Any) -> None:
    """Refuses a dataset whose samples of a step that did not fit would be gone.

    Raises:
        ValueError: If it is an iterator.
    """
    if isinstance(dataset, Iterator):
        raise ValueError(
            "auto_find_batch_size=True needs a train_dataset that can be read again after a step that did not fit; "
            "this one is an iterator: give a dataset whose __iter__ begins anew, or set it to False"
        )


def estimated_batch_size(
    run: Run,
    layout: Layout,
    reading: Reading,
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | None,
) -> int:
    """How many samples at once are estimated to fit into every device; all processes take part.

    The estimate is made with the first batch: one of longer samples may still not fit, which shows when it comes. It
    calls the model and `compute_loss` on tensors without values.

    Args:
        run: Its model is on the device.
        layout: That was asked for.
        reading: How samples are read.
        compute_loss: As the Trainer takes it.
        optimizer: The user's own, where there is one.
    """
    from trainer_kit.memory import estimate  # takes its time
    from trainer_kit.memory.advice import largest_batch, resized

    args, strategy = run.args, run.strategy
    whole = layout.batch_size
    found = whole
    try:
        room = strategy.free_memory() + _nbytes(run.model)  # what the runtime takes is taken by now
        batch = first_batch(run, reading)

        def peak(samples: int) -> int:
            micro_batches = layout.accumulation * layout._replace(limit=samples).parts(whole)
            anatomy = estimate(
                run.model,
                dataclasses.replace(args, gradient_accumulation_steps=micro_batches),
                resized(batch, samples),
                compute_loss=compute_loss,
                optimizer=optimizer,
                device=strategy.device,
                world_size=strategy.world_size,
            )
            return anatomy.in_tensors

        known = {whole: peak(whole)}
        if known[whole] > room:
            found = max(1, largest_batch(peak, known, room))
    except Exception as error:  # the model is the user's own, and sees tensors without values here
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.info("the memory of a step cannot be estimated (%s): the whole batch is tried", why)
    return min(strategy.gather_object(found))


def halved(layout: Layout) -> Layout:
    """The layout with half as many samples at once."""
    return layout._replace(limit=-(-layout.at_once // 2))


def _nbytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


class Buffers:
    """The values of a model's buffers at the beginning of a step, for a step that has to begin anew.

    Args:
        model: Its buffers may be changed in place, or be other tensors later. One that no step changes, such as a mask,
            is copied once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: dict[tuple[torch.nn.Module, str], tuple[torch.Tensor | None, int, torch.Tensor | None]] = {}

    def keep(self) -> None:
        """Copies what has changed."""
        before, self._kept = self._kept, {}  # where memory does not suffice for that, there is nothing to put back
        kept = {}
        for owner in self._model.modules():
            for name, buffer in owner._buffers.items():
                known = before.get((owner, name))
                version = 0 if buffer is None else buffer._version
                if known is None or known[0] is not buffer or known[1] != version:
                    known = buffer, version, None if buffer is None else buffer.clone()
                kept[owner, name] = known
        self._kept = kept

    def restore(self) -> None:
        """Puts them back."""
        with torch.no_grad():
            for (owner, name), (buffer, _, value) in self._kept.items():
                owner._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)

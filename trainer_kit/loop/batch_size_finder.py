"""`BatchSizeFinder`: how many samples fit into the devices' memory in one pass (`auto_find_batch_size`)."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import TrainLoader
from trainer_kit.data.peek import first_batches
from trainer_kit.data.source import data_source
from trainer_kit.loss.batch import rows_of
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.profiling.time_ledger import LOST
from trainer_kit.run import Run
from trainer_kit.strategies.base import clear_frames
from trainer_kit.utils.foreach import copy_all

logger = logging.getLogger("trainer_kit")
T = TypeVar("T")


class BatchSizeFinder:
    """A search for the largest parts of micro-batches that fit into the memory of all devices.

    The loader cuts micro-batches into these parts. The methods are collective.

    Args:
        run: The run; its model is on the device, and its optimizer is made.
        loader: The loader of the training batches, not yet started. The caller reads the batches again after each cut.

    Raises:
        ValueError: If the dataset is an iterator, from which a step that did not fit cannot be read again.
    """

    def __init__(self, run: Run, loader: TrainLoader | StreamLoader) -> None:
        if data_source("train_dataset", run.train_dataset).is_read_once:
            raise ValueError(
                "auto_find_batch_size=True needs a train_dataset that can be read again after a step that did not fit; "
                "this one is an iterator: give a dataset whose __iter__ starts from the beginning each time, or set it "
                "to False"
            )
        self.run = run
        self._loader = loader
        self._buffers = _Buffers(run.model)
        self._least = _least(run.model)
        self._began = 0  # place in the ledger at which the current step began

    def begin(self, compute_loss: ComputeLoss | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Cut micro-batches to the size found in an earlier start, else to the size estimated to fit.

        Args:
            compute_loss: The user's loss function; None: the model's own loss.
            optimizer: The user's own optimizer; None: as the arguments say.
        """
        run, layout = self.run, self._loader.layout
        if layout.ready_size is not None:
            layout = layout._replace(ready_size=first_batches(run, self._loader, 1)[0].samples)
            self._loader.layout = layout
        found = run.state.micro_batch
        if found is None:
            found = max(self._least, _estimated(run, self._loader, compute_loss, optimizer))
        if found < layout.pass_size:
            how = "are estimated to" if run.state.micro_batch is None else "were found to"
            logger.info("micro-batches are computed in parts of at most %d samples, which %s fit", found, how)
            self._cut(found)
        self._buffers.keep()  # allocates the copies now, while there is room

    def attempt(self, compute: Callable[[], T], begins: bool, model: torch.nn.Module | None = None) -> T | None:
        """Return the result of `compute` for a micro-batch; None if any process ran out of memory.

        In the latter case model and gradients are restored to the beginning of the step, which the caller repeats.

        Args:
            compute: Runs the forward and backward pass.
            begins: Whether this is the step's first micro-batch.
            model: The module that the strategy prepared, with the step's last micro-batch; None with others.
        """
        run, failed, result = self.run, None, None
        try:
            if begins:
                self._began = run.ledger.place()
                self._buffers.keep()
            result = compute()
        except Exception as error:
            if run.strategy.device_info.oom_message(error) is None:
                raise
            failed, result = error, None
        if failed is not None and model is not None:
            self._drop(failed)
            run.strategy.abandon_gradient_sync(model)
        if not self.cuts_for(failed):
            return result
        if model is not None:
            run.strategy.discard_gradient_sync(model)
        self._buffers.restore()
        run.ledger.lose(self._began)
        return None

    def cuts_for(self, error: Exception | None) -> bool:
        """Halve the parts of micro-batches if any process ran out of memory.

        Args:
            error: The error raised on this process; None if there was none.

        Returns:
            Whether the parts were halved.

        Raises:
            MemoryError: If a part already has the fewest samples that the model takes: one, or three with batch norm.
        """
        run, layout = self.run, self._loader.layout
        lack = None if error is None else run.strategy.device_info.oom_message(error)
        if not run.strategy.collectives.all_reduce_ints([lack is not None])[0]:
            return False
        self._drop(error)
        run.ledger.enter(LOST)
        why = next(each for each in run.strategy.collectives.gather_object(lack) if each is not None)
        if layout.at_once <= self._least:
            few = f"{layout.at_once} samples at a time, which a batch norm wants, fit"
            few = "one sample at a time fits" if layout.at_once == 1 else few
            raise MemoryError(
                f"not even {few} into the devices' memory at step {run.state.step + 1} ({why}); see "
                "Trainer.estimate() for options that need less"
            )
        self._cut(max(self._least, _half(layout.at_once)))
        logger.warning(
            "step %d did not fit into memory with %d samples at once (%s): from now on there are at most %d",
            run.state.step + 1, layout.at_once, why, self._loader.layout.at_once,
        )  # fmt: skip
        return True

    def _drop(self, error: Exception | None) -> None:
        """Release the memory of a step that did not fit."""
        run = self.run
        assert run.optimizer is not None
        clear_frames(error)
        run.batch = None
        run.model.zero_grad()
        run.strategy.zero_grad(run.optimizer)
        _free(run)

    def _cut(self, limit: int) -> None:
        self._loader.layout = self._loader.layout._replace(limit=limit)
        self.run.state.micro_batch = limit


def evaluation_batch_size(run: Run) -> int:
    """Return the samples of an evaluation batch on each device: the arguments' size, or less if only that fits."""
    args, state = run.args, run.state
    sizes = [args.eval_batch_size]
    if args.auto_find_batch_size:
        sizes += [state.micro_batch or sizes[0]] if args.per_device_eval_batch_size is None else []
        sizes += [state.eval_batch or sizes[0]]
    return min(sizes)


def halve_evaluation_batch(run: Run, error: Exception) -> None:
    """Halve the batch size of all further evaluations.

    Args:
        run: The run.
        error: The device's out-of-memory error.

    Raises:
        MemoryError: If the batch size is already one.
    """
    size = evaluation_batch_size(run)
    if size == 1:
        raise MemoryError(
            f"not even one sample at a time fits into the devices' memory in an evaluation ({error})"
        ) from error
    _free(run)
    run.state.eval_batch = _half(size)
    logger.warning(
        "an evaluation did not fit into memory with %d samples at once (%s): it starts again, from now on with "
        "%d", size, error, run.state.eval_batch,
    )  # fmt: skip


def _least(model: torch.nn.Module) -> int:
    """Return the smallest allowed limit: batch norm refuses a single sample, which a limit of two could leave."""
    return 3 if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()) else 1


def _half(samples: int) -> int:
    return -(-samples // 2)


def _free(run: Run) -> None:
    """Release the memory of a failed attempt."""
    gc.collect()
    run.strategy.device_info.empty_cache()


def _estimated(
    run: Run,
    loader: TrainLoader | StreamLoader,
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | None,
) -> int:
    """Estimate from the first batch how many samples fit into every device in one pass. Collective.

    A later batch of longer samples may still not fit. The model and `compute_loss` run on tensors without values.
    """
    from trainer_kit.memory import estimate  # slow to import
    from trainer_kit.memory.advice import largest_batch, resized

    args, strategy, layout = run.args, run.strategy, loader.layout
    found = whole = layout.pass_size
    try:
        room = strategy.device_info.free_memory() + _nbytes(run.model)  # the runtime's own memory is already allocated
        micro_batch = first_batches(run, loader, 1)[0]
        batch = micro_batch.batch
        if rows_of(batch) != micro_batch.samples:
            raise ValueError("its tensors do not begin with the samples")

        def peak(samples: int) -> int:
            micro_batches = layout._replace(limit=samples).passes
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
            found = _half(whole)  # in case a smaller size raises an error
            found = max(1, largest_batch(peak, known, room))
    except Exception as error:  # the user's model may fail on tensors without values
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.info("the memory of a step cannot be estimated (%s): %d samples at once are tried", why, found)
    return min(strategy.collectives.gather_object(found))


def _nbytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


class _Buffers:
    """Copies of a model's buffers from the beginning of a step, for a step that must be repeated.

    Args:
        model: The model; its buffers may be changed in place or replaced.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: dict[tuple[torch.nn.Module, str], tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers."""
        before, self._kept = self._kept, {}  # if copying runs out of memory, there is nothing to restore
        kept, present, copies = {}, [], []
        for owner in self._model.modules():
            for name, buffer in owner._buffers.items():
                _, copy = before.get((owner, name), (None, None))
                if buffer is not None and copy is not None and _alike(buffer, copy):
                    present.append(buffer)
                    copies.append(copy)
                else:
                    copy = None if buffer is None else buffer.clone()
                kept[owner, name] = buffer, copy
        copy_all(copies, present)
        self._kept = kept

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        for (owner, name), (buffer, copy) in self._kept.items():
            owner._buffers[name] = buffer
            # An expanded or inference tensor cannot be written to, and so has not changed.
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                buffer.copy_(copy)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)

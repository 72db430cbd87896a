"""`auto_find_batch_size`: how many samples of a step fit into the devices' memory at once."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import TrainLoader
from trainer_kit.data.peek import first_batches
from trainer_kit.loss.batch import rows_of
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.profiling.time_ledger import LOST
from trainer_kit.run import Run
from trainer_kit.strategies.base import clear_frames

logger = logging.getLogger("trainer_kit")
T = TypeVar("T")


class BatchSizeFinder:
    """Has the loader cut micro-batches into parts that fit into the memory of all devices.

    All processes take part in all that it does.

    Args:
        run: Its model is on the device, and its optimizer made.
        loader: Its training batches, not begun; they are to be read anew after each cut.

    Raises:
        ValueError: If the dataset is an iterator: the samples of a step that did not fit would be gone.
    """

    def __init__(self, run: Run, loader: TrainLoader | StreamLoader) -> None:
        if isinstance(run.train_dataset, Iterator):
            raise ValueError(
                "auto_find_batch_size=True needs a train_dataset that can be read again after a step that did not fit; "
                "this one is an iterator: give a dataset whose __iter__ starts from the beginning each time, or set it "
                "to False"
            )
        self.run = run
        self._loader = loader
        self._buffers = _Buffers(run.model)
        self._least = _least(run.model)
        self._began: object = None  # when the step under way did

    def begin(self, compute_loss: ComputeLoss | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Takes what was found in an earlier start, else what is estimated to fit.

        Args:
            compute_loss: As the Trainer takes it.
            optimizer: The user's own, where there is one.
        """
        run, layout = self.run, self._loader.layout
        found = run.state.micro_batch
        if found is None:
            found = max(self._least, _estimated(run, self._loader, compute_loss, optimizer))
        if found < layout.batch_size:
            how = "are estimated to" if run.state.micro_batch is None else "were found to"
            logger.info("micro-batches are computed in parts of at most %d samples, which %s fit", found, how)
            self._cut(found)
        self._buffers.keep()  # so that later there is room for them

    def attempt(self, compute: Callable[[], T], begins: bool) -> T | None:
        """What `compute` gives for a micro-batch; None if memory did not suffice on some process.

        The step is to begin anew then: model and gradients are as they were at its beginning.

        Args:
            compute: The passes.
            begins: Whether this is the step's first micro-batch.
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
        if not self.cuts_for(failed):
            return result
        self._buffers.restore()
        run.ledger.lose(self._began)
        return None

    def cuts_for(self, error: Exception | None) -> bool:
        """Cuts micro-batches into parts half as large if memory did not suffice on some process.

        Args:
            error: What was raised on this one.

        Returns:
            Whether it did.

        Raises:
            MemoryError: If a part is of one sample already.
        """
        run, layout = self.run, self._loader.layout
        lack = None if error is None else run.strategy.device_info.oom_message(error)
        if not run.strategy.collectives.all_reduce_ints([lack is not None])[0]:
            return False
        clear_frames(error)
        run.ledger.enter(LOST)
        why = next(each for each in run.strategy.collectives.gather_object(lack) if each is not None)
        if layout.at_once <= self._least:
            few = f"{layout.at_once} samples at a time, which a batch norm wants, fit"
            few = "one sample at a time fits" if layout.at_once == 1 else few
            raise MemoryError(
                f"not even {few} into the devices' memory at step {run.state.step + 1} ({why}); see "
                "Trainer.estimate() for options that need less"
            )
        assert run.optimizer is not None
        run.batch = None
        run.model.zero_grad()
        run.strategy.zero_grad(run.optimizer)
        _free(run)
        self._cut(max(self._least, _half(layout.at_once)))
        logger.warning(
            "step %d did not fit into memory with %d samples at once (%s): from now on there are at most %d",
            run.state.step + 1, layout.at_once, why, self._loader.layout.at_once,
        )  # fmt: skip
        return True

    def _cut(self, limit: int) -> None:
        self._loader.layout = self._loader.layout._replace(limit=limit)
        self.run.state.micro_batch = limit


def evaluation_batch_size(run: Run) -> int:
    """Samples of an evaluation batch on each device: as the arguments say, or what was found to fit."""
    args, state = run.args, run.state
    sizes = [args.eval_batch_size]
    if args.auto_find_batch_size:
        sizes += [state.micro_batch or sizes[0]] if args.per_device_eval_batch_size is None else []
        sizes += [state.eval_batch or sizes[0]]
    return min(sizes)


def halve_evaluation_batch(run: Run, error: Exception) -> None:
    """Has evaluations take half as many samples at once from now on.

    Args:
        run: The run.
        error: What the device said for want of memory.

    Raises:
        MemoryError: If it is one already.
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
    """Samples that a part must be allowed to have: a batch norm refuses one alone, which parts of two would leave."""
    return 3 if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()) else 1


def _half(samples: int) -> int:
    return -(-samples // 2)


def _free(run: Run) -> None:
    """Gives back what a failed attempt has left."""
    gc.collect()
    run.strategy.device_info.empty_cache()


def _estimated(
    run: Run,
    loader: TrainLoader | StreamLoader,
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | None,
) -> int:
    """How many samples at once are estimated to fit into every device; all processes take part.

    The estimate is made with the first batch: one of longer samples may still not fit, which shows when it comes. It
    calls the model and `compute_loss` on tensors without values.
    """
    from trainer_kit.memory import estimate  # takes its time
    from trainer_kit.memory.advice import largest_batch, resized

    args, strategy, layout = run.args, run.strategy, loader.layout
    found = whole = layout.batch_size
    try:
        room = strategy.device_info.free_memory() + _nbytes(run.model)  # what the runtime takes is taken by now
        micro_batch = first_batches(run, loader, 1)[0]
        batch = micro_batch.batch
        if rows_of(batch) != micro_batch.samples:
            raise ValueError("its tensors do not begin with the samples")

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
            found = _half(whole)  # should smaller ones give an error
            found = max(1, largest_batch(peak, known, room))
    except Exception as error:  # the model is the user's own, and sees tensors without values here
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.info("the memory of a step cannot be estimated (%s): %d samples at once are tried", why, found)
    return min(strategy.collectives.gather_object(found))


def _nbytes(model: torch.nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


class _Buffers:
    """The values of a model's buffers at the beginning of a step, for a step that has to begin anew.

    Args:
        model: Its buffers may be changed in place, or be other tensors later.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._kept: dict[tuple[torch.nn.Module, str], tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copies them."""
        before, self._kept = self._kept, {}  # where memory does not suffice for that, there is nothing to put back
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
        if copies:
            torch._foreach_copy_(copies, present)
        self._kept = kept

    @torch.no_grad()
    def restore(self) -> None:
        """Puts them back."""
        for (owner, name), (buffer, copy) in self._kept.items():
            owner._buffers[name] = buffer
            # One that is expanded, or of an inference, cannot be written to, nor was it.
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                buffer.copy_(copy)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)

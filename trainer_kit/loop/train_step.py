"""`Steps`: the optimizer steps of a training, from its micro-batches to new weights."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import GlobalBatch, MicroBatch, TrainLoader
from trainer_kit.data.padding import Padding
from trainer_kit.data.sampling import mix
from trainer_kit.errors import DataError
from trainer_kit.loop.batch_size_finder import BatchSizeFinder
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.loss.loss import scale_gradients, weighed
from trainer_kit.loss.probe import LossProbe
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy

_SYNC = contextlib.nullcontext()
"""The context of a step's last micro-batch, in which processes exchange their gradients."""


class Steps:
    """Takes a run's optimizer steps, one after another, without waiting for the device.

    It waits for data, for the copy of a checkpoint, and where it looks at a loss for the first time.

    Args:
        run: All in it is in place, the state of a checkpoint too.
        events: Its callbacks.
        inspection: Of its loss.
        loader: Of its training batches.
        checkpoints: Those of the training.
        agreement: Its processes'.
        fitting: Cuts what does not fit into memory; None without `auto_find_batch_size`.

    Attributes:
        micro: The micro-batch that was worked on last; None while there is none.
        fetching: Whether one is being fetched for the step under way.
    """

    def __init__(
        self,
        run: Run,
        events: CallbackList,
        inspection: LossProbe,
        loader: TrainLoader | StreamLoader,
        checkpoints: CheckpointManager,
        agreement: RankSync,
        fitting: BatchSizeFinder | None,
    ) -> None:
        self.run = run
        self.events = events
        self.loss = inspection.loss
        self.fetching = False
        self._inspection = inspection
        self._loader = loader
        self._checkpoints = checkpoints
        self._agreement = agreement
        self._fitting = fitting
        self.open_data()

    def open_data(self) -> None:
        """Makes ready the micro-batches from where the run stands to its end."""
        run, state = self.run, self.run.state
        steps = run.total_steps - state.step
        self._padding = Padding(self._inspection, run.strategy, self._loader.layout.batch_size, training=True)
        micro_batches = self._loader.micro_batches(state.epoch, state.position, steps, self._checkpoints.data_state)
        self._micro_batches = run.strategy.prepare_loader(self._padding.filled(micro_batches))
        self._ahead: MicroBatch | Exception | None = None  # the first micro-batch of the next step
        self.micro: MicroBatch | None = None

    def close(self) -> None:
        """Lets go of what was read, of what reads it, and of copies on the device."""
        self._micro_batches, self._ahead, self.micro, self._fitting = iter(()), None, None, None

    def look_ahead(self) -> bool:
        """Fetches the first micro-batch of the next step, whose counts all processes sum, and agrees on what is due.

        An error of the dataset is raised when that step comes: until then, what was done can be saved.
        """
        try:
            self._ahead = self._fetch()
        except Exception as error:
            self._ahead = error
        is_due = self._agreement.sync(self._ahead.global_batch if isinstance(self._ahead, MicroBatch) else None)
        failed = self._ahead if isinstance(self._ahead, Exception) else None
        if self._fitting is not None and not self._agreement.all_have_read:
            try:
                if self._fitting.cuts_for(failed):
                    return self._read_anew() or is_due
            except MemoryError as error:
                failed = self._ahead = error
        if self._agreement.disagreement is not None and failed is None:
            self._ahead = DataError(self._agreement.disagreement)
        return is_due

    def take(self) -> GlobalBatch:
        """Takes one optimizer step and returns which samples it was made of."""
        run, args, strategy, loss, emit = self.run, self.run.args, self.run.strategy, self.loss, self.events.call
        ledger = run.ledger
        assert run.optimizer is not None
        run.last_loss, pair_count = None, None
        while True:
            micro = self._next_micro_batch()
            window = micro.global_batch
            if micro.index == 0:
                emit("on_step_begin", run)
                strategy.device_info.mark_step()  # what callbacks computed, and an evaluation left
            passed = self._pass(micro) if self._fitting is None else self._attempt(micro)
            if passed is None:
                pair_count = None  # the step begins anew
                continue
            share, count = passed
            run.last_loss = share if run.last_loss is None else run.last_loss + share
            if count is not None:
                pair_count = count if pair_count is None else pair_count + count
            if micro.is_last:
                break
            emit("on_substep_end", run)
        strategy.sync_gradients(loss.model)
        if pair_count is not None:
            in_all = strategy.device_info.traced_scalar(_summed(strategy, pair_count))
            run.last_loss = scale_gradients(run.optimizer, run.last_loss, window.samples, in_all)
        if args.gradient_accumulation_steps > 1:  # the optimizer's part is one computation then, whatever came before
            strategy.device_info.mark_step()
        copies = self._checkpoints.saver.copies
        if copies.is_under_way:  # of the optimizer's state, which must not change before they are there
            with ledger.during("saving"):
                copies.wait()
        emit("on_pre_optimizer_step", run)
        ledger.enter("optimizer")
        run.last_norms = strategy.step(run.optimizer, args.max_grad_norm, args.max_grad_value, args.nonfinite)
        ledger.enter("loop")
        emit("on_optimizer_step", run)
        self._step_scheduler()
        strategy.zero_grad(run.optimizer)
        self._count(window)
        return window

    def leave_epoch(self) -> None:
        """Counts the epoch under way as over."""
        state = self.run.state
        state.epoch, state.position, self._checkpoints.data_state = state.epoch + 1, 0, None

    def _next_micro_batch(self) -> MicroBatch:
        micro, self._ahead, self.micro, self.fetching = self._ahead, None, None, True
        if isinstance(micro, Exception):
            raise micro
        self.micro, self.fetching = micro or self._fetch(), False
        return self.micro

    def _fetch(self) -> MicroBatch:
        ledger = self.run.ledger
        before = ledger.enter("data")
        try:
            return next(self._micro_batches)
        finally:
            ledger.enter(before)

    def _pass(self, micro: MicroBatch) -> tuple[torch.Tensor, Any]:
        """One forward and backward pass: its share of the step's loss, and what a loss counted that counts itself."""
        run, strategy, loss, window = self.run, self.run.strategy, self.loss, micro.global_batch
        if loss.shifts is not None:
            batch = self._on_device(micro)
        else:
            try:
                batch = self._on_device(micro)
                self._inspection.detect_label_shift(batch)
            finally:  # the other processes wait for the answer
                self._checkpoints.shifts_labels = loss.set_label_shift(strategy.collectives.gather_object(loss.shifts))
        items, total = loss.items(micro.counts), loss.items(window)
        # A step's only micro-batch has the weight 1, whatever it counts.
        if not (micro.index == 0 and micro.is_last and isinstance(items, int) and items):
            items, total = strategy.device_info.traced_scalar(items), strategy.device_info.traced_scalar(total)
        if not (isinstance(items, int) and items):
            batch = loss.with_valid_labels(batch, items, strategy.autocast)
        run.ledger.enter("forward")
        strategy.seed(mix(run.args.seed, window.epoch, micro.start))
        with _SYNC if micro.is_last else strategy.no_sync(loss.model):
            with strategy.autocast():
                value, count = loss(batch)
            if count is not None and not micro.counts.samples:  # a stand-in
                value, count = value * 0, count * 0
            share = (
                weighed(value, items, total)
                if count is None
                else value / strategy.device_info.traced_scalar(window.samples)
            )
            run.ledger.enter("backward")
            strategy.backward(share)
        run.ledger.enter("loop")
        return share.detach(), count

    def _on_device(self, micro: MicroBatch) -> Any:
        run = self.run
        run.batch = self._padding.settled(run.strategy.to_device(micro.batch), micro.unfilled)
        return run.batch

    def _attempt(self, micro: MicroBatch) -> tuple[torch.Tensor, Any] | None:
        """The same where memory may not suffice: None if it did not on some process; the step then begins anew."""
        assert self._fitting is not None

        def compute() -> tuple[torch.Tensor, Any]:
            passed = self._pass(micro)
            if not micro.is_last:
                self._ahead = self._fetch()  # may want memory too
            return passed

        passed = self._fitting.attempt(compute, begins=micro.index == 0)
        if passed is None:
            self.run.last_loss = None
            self._read_anew()
        return passed

    def _read_anew(self) -> bool:
        """Reads the next step's samples again, in other parts; returns whether something is due before it."""
        self.open_data()
        is_due = self.look_ahead()
        self.run.ledger.enter("loop")
        return is_due

    def _step_scheduler(self) -> None:
        scheduler = self.run.lr_scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            return  # at evaluations
        if self.run.state.step > 0:
            scheduler.step()
            return
        with warnings.catch_warnings():  # torch warns where the first step was left out for a gradient not finite
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            scheduler.step()

    def _count(self, window: GlobalBatch) -> None:
        state = self.run.state
        state.step += 1
        state.samples += window.stop - window.start
        state.tokens += window.tokens
        # It is of a later epoch where that of a checkpoint, in another layout now, had no whole batch left.
        state.epoch, state.position, self._checkpoints.data_state = window.epoch, window.stop, window.data_state
        if window.closes_epoch:
            self.leave_epoch()


def _summed(strategy: Strategy, count: Any) -> Any:
    """The count over all processes of a loss that counts for itself."""
    if isinstance(count, int):
        return strategy.collectives.all_reduce_ints([count])[0]
    return (
        strategy.collectives.all_reduce(count)
        if isinstance(count, torch.Tensor)
        else sum(strategy.collectives.gather_object(count))
    )

"""`TrainStep`: one optimizer step, from its micro-batches to new weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
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
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.loss.loss import scale_gradients, weighed
from trainer_kit.loss.means import add_sums, sum_values
from trainer_kit.loss.probe import LossProbe
from trainer_kit.optim import may_draw
from trainer_kit.run import Run
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.utils.closures import refuse_without_graph

_UPDATE = -1
"""Number by which the seed of an optimizer's step differs from those of its micro-batches."""

_SYNC = contextlib.nullcontext()
"""The context of a step's last micro-batch, in which ranks synchronize their gradients."""


class TrainStep:
    """A run's optimizer steps, taken one after another without waiting for the device.

    A step waits only for data, for the staging of a checkpoint, and for the probe of the loss.

    Args:
        run: The run, set up and with the state of a checkpoint restored.
        events: The run's callbacks.
        probe: The probe of the run's loss.
        loader: The loader of the training batches.
        checkpoints: The checkpoint manager of the training.
        sync: Shares the requests and the counts of the ranks.

    Attributes:
        micro_batch: The current or last micro-batch; None before the first and while one is fetched.
        is_fetching: Whether a micro-batch of the current step is being fetched.
        has_changed_weights: Whether the optimizer has stepped; the loop resets it when the step is counted and heard.
        group: The strategy if a step that breaks is repeated; None if not.
        ledger_place: Beginning of such a step in the time ledger; None between two steps.
    """

    def __init__(
        self,
        run: Run,
        events: CallbackList,
        probe: LossProbe,
        loader: TrainLoader | StreamLoader,
        checkpoints: CheckpointManager,
        sync: RankSync,
    ) -> None:
        self.loss = probe.loss
        self.is_fetching = self.has_changed_weights = False
        self.group: Regroupable | None = None
        self.ledger_place: int | None = None
        self._run = run
        self._events = events
        self._probe = probe
        self._loader = loader
        self._checkpoints = checkpoints
        self._sync = sync
        self._item_count: Any = None  # of the current step, if compute_loss returns (loss_sum, count)
        self._to_device: Callable[[Any], Any] = self._probe_on_device
        # With several ranks, callbacks may draw random numbers too, which have to be the same on all of them.
        self._seeds_update = not run.strategy.collectives.is_alone or may_draw(run.optimizer)
        self.open_data()

    def open_data(self) -> None:
        """Open the stream of micro-batches from the run's position to its end."""
        run, state = self._run, self._run.state
        steps = run.total_steps - state.step
        micro_batches = self._loader.micro_batches(state.epoch, state.position, steps, self._checkpoints.data_state)
        if run.strategy.static_shapes:
            padding = Padding(self._probe, run.strategy, self._loader.layout.padded_size, training=True)
            self._micro_batches = padding.kept(run.strategy.prepare_loader(padding.filled(micro_batches)))
        else:
            self._micro_batches = run.strategy.prepare_loader(micro_batches)
        self._ahead: MicroBatch | Exception | None = None  # the first micro-batch of the next step
        self.micro_batch: MicroBatch | None = None

    def close(self) -> None:
        """Release the prefetched batches, the loader's workers, and copies on the device."""
        self._micro_batches, self._ahead, self.micro_batch = iter(()), None, None

    def prefetch(self) -> bool:
        """Prefetch the next step's first micro-batch, sum its counts over all ranks, and share their requests.

        If the step that ends has begun this already, wait for the sums. An error of the dataset is raised when the
        next step begins, so that the state before it can still be saved.

        Returns:
            Whether any request is pending.
        """
        sync = self._sync
        is_due = sync.read() if sync.ballot is not None else sync.sync(self._fetch_first())
        if sync.disagreement is not None and not isinstance(self._ahead, Exception):
            self._ahead = DataError(sync.disagreement)
        return is_due

    def run(self) -> GlobalBatch:
        """Take one optimizer step and return its global batch."""
        run, args, strategy, call = self._run, self._run.args, self._run.strategy, self._events.call
        assert run.optimizer is not None
        run.local_loss = self._item_count = None
        run.local_sums = {}
        micro_batch = self._next_micro_batch()
        if self.group is not None:
            self.ledger_place = run.ledger.place()
            self.group.keep_buffers()
        call("on_step_begin", run)
        strategy.device_info.mark_step()  # separates the computations of callbacks and evaluations
        while True:
            if micro_batch.is_last and self._sync.votes_ahead:
                self._begin_vote(micro_batch.global_batch)
            self.forward_backward(micro_batch)
            if micro_batch.is_last:
                break
            call("on_substep_end", run)
            micro_batch = self._next_micro_batch()
        strategy.sync_gradients(self.loss.model)
        global_batch = micro_batch.global_batch
        if self._item_count is not None:
            self._divide_by_item_count(global_batch)
        if (
            args.gradient_accumulation_steps > 1 or micro_batch.index
        ):  # the optimizer's step becomes one computation of its own
            strategy.device_info.mark_step()
        self._checkpoints.saver.wait_for_staging()
        if self._seeds_update:
            strategy.seed(mix(args.seed, global_batch.epoch, global_batch.start, _UPDATE))
        call("on_pre_optimizer_step", run)
        run.ledger.enter("optimizer")
        try:
            run.last_norms = strategy.step(run.optimizer, args.max_grad_norm, args.max_grad_value, args.nonfinite)
        except RuntimeError as error:
            refuse_without_graph(run.optimizer, error)
            raise
        run.ledger.enter("loop")
        self.has_changed_weights = True
        rate = run.optimizer.param_groups[0]["lr"]
        run.state.learning_rate = rate if rate.__class__ is float else _kept(rate)
        call("on_optimizer_step", run)
        self._step_scheduler()
        strategy.zero_grad(run.optimizer)
        self._advance(global_batch)
        self.ledger_place = None
        return global_batch

    def forward_backward(self, micro_batch: MicroBatch) -> None:
        """Add a micro-batch's share to the step's loss and gradients."""
        run, strategy, loss, global_batch = self._run, self._run.strategy, self.loss, micro_batch.global_batch
        batch = run.batch = self._to_device(micro_batch.batch)
        items, total = loss.items(micro_batch.counts), loss.items(global_batch)
        # A step's only micro-batch has weight 1, whatever its number of items.
        has_items = isinstance(items, int) and items > 0
        if not (micro_batch.index == 0 and micro_batch.is_last and has_items):
            items, total = strategy.device_info.traced_scalar(items), strategy.device_info.traced_scalar(total)
        if loss.returns_sum_and_count is None:
            with strategy.uneven_passes():
                batch = batch if has_items else loss.with_valid_labels(batch, items, strategy.autocast)
        elif not has_items:
            batch = loss.with_valid_labels(batch, items, strategy.autocast)
        run.ledger.enter("forward")
        strategy.seed(mix(run.args.seed, global_batch.epoch, micro_batch.start))
        with _SYNC if micro_batch.is_last else strategy.no_sync(loss.model):
            with strategy.autocast():
                value, count = loss(batch)
            if count is not None:
                share = self._add_item_count(micro_batch, value, count)
            else:
                share = weighed(value, items, total)
            if loss.log.values:
                self._add_logged(micro_batch, items if count is None else count)
            run.ledger.enter("backward")
            strategy.backward(share)
        share = share.detach()
        if run.local_loss is not None:  # a sum of many in 16 bits would be wrong
            share = run.local_loss.to(torch.promote_types(share.dtype, torch.float32)) + share
        run.local_loss = share

    def leave_epoch(self) -> None:
        """Count the current epoch as finished."""
        state, checkpoints = self._run.state, self._checkpoints
        checkpoints.data_state = self._loader.state_after(state.epoch, checkpoints.data_state)
        state.epoch, state.position = state.epoch + 1, 0

    # The parts of a step

    def _next_micro_batch(self) -> MicroBatch:
        micro_batch, self._ahead, self.micro_batch, self.is_fetching = self._ahead, None, None, True
        if isinstance(micro_batch, Exception):
            raise micro_batch
        self.micro_batch, self.is_fetching = micro_batch or self._fetch(), False
        return self.micro_batch

    def _begin_vote(self, global_batch: GlobalBatch) -> None:
        """Prefetch the next step's first micro-batch, and begin the vote on it, which `prefetch` reads."""
        step, run = self._run.state.step + 1, self._run
        # An epoch's first batch is fetched after on_epoch_begin, which may change the dataset.
        if not global_batch.closes_epoch and step < run.total_steps:
            self._sync.begin(self._fetch_first(), step + 1)

    def _fetch_first(self) -> GlobalBatch | None:
        """Fetch the first micro-batch of the next step; return its global batch, None if the dataset raised."""
        try:
            self._ahead = self._fetch()
        except Exception as error:
            self._ahead = error
            return None
        return self._ahead.global_batch

    def _fetch(self) -> MicroBatch:
        ledger = self._run.ledger
        before = ledger.enter("data")
        try:
            return next(self._micro_batches)
        finally:
            ledger.enter(before)

    def _probe_on_device(self, batch: Any) -> Any:
        """Move a batch to the device, and probe with it whether the model shifts its labels. Collective.

        The first batch that answers the question ends the probing; a batch without valid labels does not.
        """
        run, loss = self._run, self.loss
        if loss.shifts is None:
            try:
                batch = run.batch = run.strategy.to_device(batch)
                with run.strategy.uneven_passes():
                    self._probe.detect_label_shift(batch)
            finally:  # the other ranks wait for the answer
                self._checkpoints.shifts_labels = loss.agree(run.strategy.collectives)
        else:
            batch = run.strategy.to_device(batch)
        if loss.shifts is not None:
            self._to_device = run.strategy.to_device
        return batch

    def _step_scheduler(self) -> None:
        scheduler = self._run.lr_scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            return  # steps after evaluations
        if self._run.state.step > 0:
            scheduler.step()
            return
        with warnings.catch_warnings():  # torch warns if a non-finite gradient skipped the first step
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            scheduler.step()

    def _advance(self, global_batch: GlobalBatch) -> None:
        """Add the step to the counters."""
        state = self._run.state
        state.step += 1
        state.samples += global_batch.samples
        state.tokens += global_batch.tokens
        if state.position == 0 and not self._loader.has_equal_epochs:
            state.epoch_length = self._loader.length_of(global_batch.epoch)
        # The epoch may be a later one: under a new layout, a checkpoint's epoch may have no whole batch left.
        state.epoch, state.position = global_batch.epoch, global_batch.stop
        self._checkpoints.data_state = global_batch.data_state
        if global_batch.closes_epoch:
            self.leave_epoch()

    def _add_logged(self, micro_batch: MicroBatch, items: Any) -> None:
        """Add what the micro-batch's pass logged to the step's sums."""
        items = items if micro_batch.counts.samples else 0  # a dummy batch
        trace = self._run.strategy.device_info.traced_scalar
        add_sums(self._run.local_sums, sum_values(self.loss.log.values, items, trace, needs_items=True))

    # compute_loss that returns (loss_sum, count)

    def _add_item_count(self, micro_batch: MicroBatch, loss_sum: torch.Tensor, count: Any) -> torch.Tensor:
        """Add a micro-batch's item count, and return its share of the loss over the step's samples."""
        if not micro_batch.counts.samples:  # a dummy batch
            loss_sum, count = loss_sum * 0, count * 0
        self._item_count = count if self._item_count is None else self._item_count + count
        share: torch.Tensor = loss_sum / self._run.strategy.device_info.traced_scalar(micro_batch.global_batch.samples)
        return share

    def _divide_by_item_count(self, global_batch: GlobalBatch) -> None:
        """Rescale the step's loss and gradients from a mean over samples to the mean over all ranks' items."""
        run, strategy, count = self._run, self._run.strategy, self._item_count
        assert run.optimizer is not None
        assert run.local_loss is not None
        collectives = strategy.collectives
        if isinstance(count, int):
            count = collectives.all_reduce_ints([count])[0] // collectives.reader_size
        elif isinstance(count, torch.Tensor):
            count = collectives.sum_over_readers(count)
        else:
            count = sum(collectives.once_a_reader(collectives.gather_object(count)))
        parameters = [p for group in run.optimizer.param_groups for p in group["params"] if p.grad is not None]
        run.local_loss = scale_gradients(
            strategy.sharding.gradients(parameters),
            run.local_loss,
            global_batch.samples,
            strategy.device_info.traced_scalar(count),
        )


def _kept(rate: Any) -> float | torch.Tensor:
    """Return a learning rate as it is now, without waiting for the device; a schedule changes a tensor in place."""
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)

"""`RetryingTrainStep`: an optimizer step that is repeated with smaller parts after an out-of-memory error."""

from __future__ import annotations

import contextlib

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import GlobalBatch, MicroBatch, TrainLoader
from trainer_kit.loop.batch_size_finder import BatchSizeFinder
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.loop.train_step import TrainStep
from trainer_kit.loss.probe import LossProbe
from trainer_kit.run import Run


class _StepDoesNotFit(Exception):
    """Raised after a rank ran out of memory and micro-batches were cut."""


class RetryingTrainStep(TrainStep):
    """Optimizer steps with `auto_find_batch_size`, repeated after an out-of-memory error.

    Args:
        run: See `TrainStep`.
        events: See `TrainStep`.
        probe: See `TrainStep`.
        loader: See `TrainStep`.
        checkpoints: See `TrainStep`.
        sync: See `TrainStep`.
        finder: Cuts the micro-batches that do not fit into memory.
    """

    def __init__(
        self,
        run: Run,
        events: CallbackList,
        probe: LossProbe,
        loader: TrainLoader | StreamLoader,
        checkpoints: CheckpointManager,
        sync: RankSync,
        finder: BatchSizeFinder,
    ) -> None:
        super().__init__(run, events, probe, loader, checkpoints, sync)
        self._finder: BatchSizeFinder | None = finder

    def run(self) -> GlobalBatch:
        while True:
            with contextlib.suppress(_StepDoesNotFit):
                return super().run()
            self._read_again()

    def forward_backward(self, micro_batch: MicroBatch) -> None:
        assert self._finder is not None

        def compute() -> bool:
            TrainStep.forward_backward(self, micro_batch)
            if not micro_batch.is_last:
                self._ahead = self._fetch()  # may run out of memory too
            return True

        model = self.loss.model if micro_batch.is_last else None
        if self._finder.attempt(compute, micro_batch.index == 0, model) is None:
            raise _StepDoesNotFit

    def prefetch(self) -> bool:
        assert self._finder is not None
        is_due = super().prefetch()
        if self._sync.all_have_read:
            return is_due
        try:
            if self._finder.cuts_for(self._ahead if isinstance(self._ahead, Exception) else None):
                return self._read_again() or is_due
        except MemoryError as error:
            self._ahead = error
        return is_due

    def close(self) -> None:
        super().close()
        self._finder = None  # holds copies of the model's buffers

    def _read_again(self) -> bool:
        """Read the next step's samples again, in smaller parts; return whether any request is pending."""
        self.open_data()
        is_due = self.prefetch()
        self._run.ledger.enter("loop")
        return is_due

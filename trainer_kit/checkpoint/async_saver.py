"""`AsyncSaver`: writes the checkpoints of a run in the background, one at a time."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint import (
    CHECKPOINT_PREFIX,
    Committed,
    Retention,
    Snapshot,
    pretrained_files,
    prune,
    take_snapshot,
    write_checkpoint,
)
from trainer_kit.checkpoint.format.json_files import is_too_large
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.errors import SaveError
from trainer_kit.run import Run
from trainer_kit.utils.units import format_count, format_size

logger = logging.getLogger("trainer_kit")

States = Callable[[list[Committed]], Mapping[str, Any]]
"""Returns all states but the model's weights, by name; takes the run's checkpoints including the new one."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a save.

    Attributes:
        step: Step of the checkpoint.
        committed: The run's checkpoints after the save, oldest first.
        error: Why the save failed; None if it succeeded.
    """

    step: int
    committed: list[Committed]
    error: str | None = None


class AsyncSaver:
    """Takes snapshots of a run and writes them in a thread of the main process, while training continues.

    Args:
        run: The run.
        is_own: Returns whether a checkpoint belongs to this training; called before a deletion.
        confirm: Raises if another training holds the folder now; called before each change there.

    Attributes:
        committed: The run's checkpoints, oldest first.
        is_busy: Whether a save has begun and neither `finish` nor `drain` has returned its result.
        failed: Result of the last save if it failed, else None.
        failures: Number of failed saves since this start.
        copies: Copies of the run's tensors in host memory.
    """

    def __init__(self, run: Run, is_own: Callable[[Path], bool], confirm: Callable[[], object]) -> None:
        self.run = run
        self.is_own = is_own
        self.confirm = confirm
        self.folder = Path(run.args.output_dir)
        self.committed: list[Committed] = []
        self.is_busy = False
        self.failed: Outcome | None = None
        self.failures = 0
        self._requests = run.requests
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Outcome] | None = None  # on the main process
        self._reserving: Future[None] | None = None
        self.copies = HostStaging(run)

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint; None before the first."""
        return self.folder / self.committed[-1].name if self.committed else None

    def judge(self, name: str, metric: float) -> None:
        """Record the metric of an evaluation for the checkpoint of this name, if there is one."""
        self.committed = [
            dataclasses.replace(each, metric=metric) if each.name == name else each for each in self.committed
        ]

    def begin(
        self,
        model_state: Mapping[str, torch.Tensor],
        states: States,
        metric: float | None,
        protect: Collection[str],
    ) -> None:
        """Take a snapshot of the run and begin to write it. Collective.

        Args:
            model_state: All tensors of the model by name.
            states: Returns all other states.
            metric: Metric of an evaluation at this step; None without one.
            protect: Names of checkpoints that retention must keep.

        Raises:
            TypeError: If a state holds a value that a checkpoint cannot hold.
            ValueError: If the name of a state cannot be a file name.
        """
        assert not self.is_busy, "one save at a time"
        self.run.strategy.session.set_abort_handler(self.drain)
        self.run.strategy.collectives.on_main(lambda: self._begin(model_state, states, metric, protect))
        self.is_busy = True

    def wait_for_staging(self) -> None:
        """Wait until staging is complete, so that the optimizer may change its state."""
        if self.copies.is_under_way:
            with self.run.ledger.during("saving"):
                self.copies.wait()

    def finish(self) -> Path | None:
        """Wait until the checkpoint is written. Collective.

        Returns:
            Folder of the checkpoint; None if the save failed, which is logged as a warning.

        Raises:
            SaveError: If the save failed and `save_failures="raise"`.
        """
        outcome = self.run.strategy.collectives.on_main(self._outcome)
        self.is_busy = self._requests.written = False
        self._take_in(outcome)
        if outcome.error is None:
            return self.newest
        if self.run.args.save_failures == "raise":
            raise self.error()
        logger.warning(
            "the checkpoint of step %d could not be written: %s; the next save tries again, %s (%d failed so far)",
            outcome.step, outcome.error, self._kept(), self.failures,
        )  # fmt: skip
        return None

    def _take_in(self, outcome: Outcome) -> None:
        self.committed = outcome.committed
        if outcome.error is None:
            self.failed = None
            self.run.strategy.session.report_saved_step(outcome.step)
        else:
            self.failed, self.failures = outcome, self.failures + 1

    def error(self) -> SaveError:
        """Return the error of the last save, which must have failed."""
        assert self.failed is not None
        return SaveError(
            f"the checkpoint of step {self.failed.step} could not be written: {self.failed.error}; {self._kept()}"
        )

    def drain(self) -> None:
        """Wait for the pending save after an error, and log its failure. Not collective."""
        pending, self._pending, self.is_busy = self._pending, None, False
        if pending is None:
            return
        if not pending.done():
            logger.warning("the checkpoint that was begun is still being written; waiting for it")
        if error := pending.exception():
            logger.warning("the checkpoint that was begun could not be written: %s", error)
            return
        self._take_in(pending.result())
        if self.failed is not None:
            logger.warning("%s", self.error())

    def close(self) -> None:
        """Stop the thread and free the host's copies."""
        self.run.strategy.session.set_abort_handler(None)
        self._thread.shutdown()
        self.copies.free()

    def check_space(self, model_state: Mapping[str, torch.Tensor], states: States) -> None:
        """Warn if the disk lacks space for the planned checkpoints. Collective.

        With `async_save`, this also reserves host memory for staging, in the background.

        Raises:
            TypeError: If a state holds a value that a checkpoint cannot hold.
            ValueError: If the name of a state cannot be a file name, or a state is too large as JSON.
        """
        self.run.strategy.collectives.on_main(lambda: self._check_space(model_state, states))

    def _check_space(self, model_state: Mapping[str, torch.Tensor], states: States) -> None:
        snapshot = self._snapshot(model_state, states([]), copy=self._reserve)
        for name, (tree, _) in snapshot.states.items():
            if is_too_large(json.dumps(tree).encode()):
                raise ValueError(f"the state {name!r} holds too long lists for a checkpoint; keep them as tensors")
        size = snapshot.nbytes
        count = checkpoints_at_once(self.run) - len(self.committed)
        try:
            pretrained_files(self.run.model, self.run.processing_class)  # raises now, not at the first save
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return  # the first save reports it
        if size * count > free:
            checkpoints = f"{format_count(count, 'more checkpoint')} of {format_size(size)}"
            logger.warning(
                "%s may run out of space: %s take %s, %s are free; set a smaller save_total_limit, or another "
                "output_dir", self.folder, checkpoints, format_size(size * count), format_size(free),
            )  # fmt: skip

    def _begin(
        self,
        model_state: Mapping[str, torch.Tensor],
        states: States,
        metric: float | None,
        protect: Collection[str],
    ) -> None:
        run, step = self.run, self.run.state.step
        committed = self._with(Committed(f"{CHECKPOINT_PREFIX}{step}", 0, metric))
        values = states(committed)
        try:
            self.confirm()
            files = pretrained_files(run.model, run.processing_class)
            snapshot = self._snapshot(model_state, values, files, self._copies if run.args.async_save else None)
        except OSError as error:
            self._pending = Future()
            self._pending.set_result(Outcome(step, self.committed, str(error)))
            self._requests.written = True
            return
        if run.args.async_save:
            self._pending = self._thread.submit(self._write, snapshot, committed, protect)
        else:
            outcome = self._write(snapshot, committed, protect)
            self._pending = Future()  # set only after success: an error leaves nothing pending
            self._pending.set_result(outcome)

    def _snapshot(
        self,
        model_state: Mapping[str, torch.Tensor],
        states: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        copy: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> Snapshot:
        run = self.run
        return take_snapshot(
            run.state.step,
            model_state,
            states,
            arguments=run.args.to_dict(),
            world_size=run.strategy.world_size,
            files=files,
            copy=copy,
        )

    def _reserve(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.run.args.async_save:
            self._reserving = self._thread.submit(self.copies.reserve, tensors)
        return tensors

    def _copies(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._reserving is not None:
            self._reserving.result()
        return self.copies.take(tensors)

    def _with(self, new: Committed) -> list[Committed]:
        """Return the run's checkpoints after the next commit, which may replace one of the same step."""
        number, metric = max((each.number for each in self.committed), default=0) + 1, new.metric
        for same in (each for each in self.committed if each.name == new.name):
            number, metric = same.number, same.metric if metric is None else metric
        others = [each for each in self.committed if each.name != new.name]
        return [*others, dataclasses.replace(new, number=number, metric=metric)]

    def _write(self, snapshot: Snapshot, committed: list[Committed], protect: Collection[str]) -> Outcome:
        args = self.run.args
        try:
            if args.async_save:
                self.copies.complete()
            to_host = self.run.strategy.device_info.to_host
            write_checkpoint(
                self.folder, snapshot, max_shard_size=args.max_shard_size, to_host=to_host, confirm=self.confirm
            )
            self.confirm()
            return Outcome(snapshot.step, prune(self.folder, committed, retention(args), protect, self.is_own))
        except (OSError, MemoryError) as error:
            return Outcome(snapshot.step, self.committed, str(error) or "no memory")
        finally:
            self._requests.written = True

    def _outcome(self) -> Outcome:
        assert self._pending is not None
        outcome = self._pending.result()
        self._pending = None
        return outcome

    def _kept(self) -> str:
        return f"the newest checkpoint is {self.newest}" if self.committed else "there is no other checkpoint"


def retention(args: TrainingArguments) -> Retention:
    """Return the retention rule of the arguments."""
    return Retention(args.save_total_limit, args.save_best_limit, args.save_keep_every, bool(args.greater_is_better))


def checkpoints_at_once(run: Run, planned: int | None = None) -> int:
    """Estimate the largest number of checkpoints of a run on the disk at the same time.

    Args:
        run: The run, with its total steps.
        planned: Number of checkpoints that the run commits in all; None: estimate it from the arguments.
    """
    args = run.args
    is_known = planned is not None or args.save_strategy in ("steps", "epoch")
    if planned is None:
        planned = 1
        if args.save_strategy == "steps":
            planned = max(1, -(-run.total_steps // args.save_steps))
        elif args.save_strategy == "epoch" and args.max_steps == -1:
            planned = int(-(-args.num_train_epochs // 1))
    if args.save_total_limit is None:
        return planned
    best = args.save_best_limit if args.metric_for_best_model is not None else 0
    for_good = planned // args.save_keep_every if args.save_keep_every else 0
    limit = args.save_total_limit + best + for_good
    return (min(limit, planned) if is_known else limit) + 1

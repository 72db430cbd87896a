"""`AsyncSaver`: writes the checkpoints of a run in the background, one at a time."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint import (
    CHECKPOINT_PREFIX,
    Committed,
    Retention,
    Snapshot,
    prune,
    take_snapshot,
)
from trainer_kit.checkpoint.base_weights import BaseWeights
from trainer_kit.checkpoint.contribution import Contribution
from trainer_kit.checkpoint.format.commit import open_staging
from trainer_kit.checkpoint.format.export import model_files
from trainer_kit.checkpoint.format.json_files import is_too_large
from trainer_kit.checkpoint.format.ownership import Division
from trainer_kit.checkpoint.save import Outcome, Save
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.checkpoint.writers import Writers
from trainer_kit.config.event_schedule import steps_between
from trainer_kit.errors import SaveError
from trainer_kit.run import Run
from trainer_kit.utils.units import format_count, format_size

logger = logging.getLogger("trainer_kit")

States = Callable[[list[Committed]], Mapping[str, Any]]
"""Returns all states but the model's weights, by name; takes the run's checkpoints including the new one."""

SHARED = ("optimizer",)
"""States that all processes have alike, so that several can write them together."""

LOSS_SECONDS = 5.0
"""Time in which parts that a lost process has sent still arrive."""


class AsyncSaver:
    """Takes snapshots of a run and writes them in a thread, while training continues.

    Several processes may write together, see `Writers`. The main one waits in its thread for the other parts.

    Args:
        run: The run.
        is_own: Returns whether a checkpoint belongs to this training; called before a deletion.
        confirm: Raises if another training holds the folder now; called before each change there.

    Attributes:
        committed: The run's checkpoints, oldest first.
        is_busy: Whether a save has begun and neither `finish` nor `drain` has returned its result.
        failed: Result of the last save if it failed, else None.
        failures: Number of failed saves since this start.
        is_copying: Whether `copies` serve a copy to memory, see `PeerCopier`.
        copies: Copies of the run's tensors in host memory.
        writers: The processes that write the checkpoints.
        base: Frozen weights to which the checkpoints refer; None: they hold all weights.
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
        self.is_copying = False
        self._requests = run.requests
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Outcome | None] | None = None  # None as the result of a process that is not the main one
        self._reserving: Future[None] | None = None
        self._drain_lock = threading.Lock()  # the heartbeat's thread drains too, before it ends this process
        self.copies = HostStaging(run)
        self.writers = Writers(run.strategy, SHARED, run.args.max_shard_size)
        self.base: BaseWeights | None = None

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint; None before the first."""
        return self.folder / self.committed[-1].name if self.committed else None

    def judge(self, name: str, metric: float) -> None:
        """Record the metric of an evaluation for the checkpoint of this name, if there is one."""
        self.committed = [each._replace(metric=metric) if each.name == name else each for each in self.committed]

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
            states: Returns all other states on the main process, and at least those of `SHARED` on the others; on all
                processes if the strategy shards the state.
            metric: Metric of an evaluation at this step; None without one.
            protect: Names of checkpoints that retention must keep.

        Raises:
            TypeError: If a state holds a value that a checkpoint cannot hold.
            ValueError: If the name of a state cannot be a file name.
        """
        assert not self.is_busy, "one save at a time"
        strategy = self.run.strategy
        strategy.session.set_abort_handler(lambda: self.drain(after_loss=True))
        committed = self.committed_with(Committed(f"{CHECKPOINT_PREFIX}{self.run.state.step}", 0, metric))
        snapshot = self.try_snapshot(model_state, lambda: states(committed))
        try:
            taken, division = self.writers.agree(snapshot)
        except OSError as error:
            self._fail(str(error))
            return
        save = strategy.collectives.on_main(lambda: self._open(snapshot))
        self.is_busy = True
        if save is None or not self.writers.contributes(division):
            return
        assert taken is not None, "the processes have agreed"
        contribution = self.writers.all_give(lambda: self._taken(taken, division), self.copies.complete)
        if strategy.is_main:
            self._submit(lambda: self._write(contribution, save, division, committed, protect))
        else:
            self._submit(lambda: save.send_part(contribution, strategy, self.run.args.max_shard_size))

    def _fail(self, error: str) -> None:
        """End a save that cannot begin."""
        self.is_busy = self._requests.written = True
        if self.run.strategy.is_main:
            self._pending = Future()
            self._pending.set_result(Outcome(self.run.state.step, self.committed, error))

    def _open(self, snapshot: Future[Snapshot]) -> Save | None:
        """Create the staging folder for the main process's snapshot; None if the disk prevents it."""
        step = self.run.state.step
        try:
            self.confirm()
            snapshot.result()
            staging = open_staging(self.folder, f"{CHECKPOINT_PREFIX}{step}")
            return Save(step, staging.absolute(), uuid.uuid4().hex)
        except OSError as error:
            self._fail(str(error))
            return None

    def try_snapshot(
        self, model_state: Mapping[str, torch.Tensor], states: Callable[[], Mapping[str, Any]]
    ) -> Future[Snapshot]:
        """Take the snapshot of this process; return its error instead of raising it, since the others wait for it."""
        run, taken = self.run, Future[Snapshot]()
        try:
            own, adapters = (model_state, None) if self.base is None else self.base.split(model_state)
            files = model_files(run.model, run.processing_class) if run.strategy.is_main else None
            size, arguments = run.strategy.world_size, run.args.to_dict()
            snapshot = take_snapshot(
                run.state.step, own, states(), arguments=arguments, world_size=size, files=files, adapters=adapters
            )
            taken.set_result(snapshot)
        except Exception as error:
            taken.set_exception(error)
        return taken

    def _taken(self, snapshot: Snapshot, division: Division | None) -> Contribution:
        if self.run.args.async_save:
            return self.staged(self.writers, snapshot, division)
        return self.writers.contribution(snapshot, division)

    def staged(self, writers: Writers, snapshot: Snapshot, division: Division | None) -> Contribution:
        """Return what this process gives to a save or a copy, with copies of its tensors.

        Raises:
            OSError: If the host lacks memory for the copies.
        """
        if self._reserving is not None:
            self._reserving.result()
        return writers.contribution(snapshot, division).copied(self.copies.take, self.copies.complete)

    def _submit(self, write: Callable[[], Outcome | None]) -> None:
        """Write in the thread; with `async_save=False`, write now."""
        if self.run.args.async_save:
            self._pending = self._thread.submit(write)
            return
        done: Future[Outcome | None] = Future()
        try:
            done.set_result(write())
        except Exception as error:  # `finish` raises it on all processes
            done.set_exception(error)
        self._pending = done

    def wait_for_staging(self) -> None:
        """Wait until staging is complete, so that the optimizer may change its state."""
        if (self.is_busy or self.is_copying) and self.copies.is_under_way:
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
        assert outcome is not None
        if self._pending is not None:  # of a process that is not the main one
            self._outcome()
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

    def drain(self, after_loss: bool = False) -> None:
        """Wait for the pending save after an error, and log its failure. Not collective.

        Args:
            after_loss: Whether another process is lost. A save that waits for parts of other processes is given up.
        """
        with self._drain_lock:
            pending, self._pending, self.is_busy = self._pending, None, False
            if pending is None:
                return
            if not pending.done():
                logger.warning("the checkpoint that was begun is still being written; waiting for it")
            while after_loss and not wait([pending], LOSS_SECONDS).done:
                if self.run.strategy.sharding.is_waiting:
                    logger.warning("the checkpoint that was begun needs parts of the lost process; it is given up")
                    return
            if error := pending.exception():
                logger.warning("the checkpoint that was begun could not be written: %s", error)
                return
            outcome = pending.result()
            if outcome is None:  # of a process that is not the main one
                return
            self._take_in(outcome)
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
        strategy = self.run.strategy
        snapshot = self.try_snapshot(model_state, lambda: states([]))
        try:
            taken, division = self.writers.agree(snapshot)
        except OSError:
            return  # the first save reports it
        strategy.collectives.on_main(lambda: self._check_space(snapshot))
        if self.run.args.async_save and self.writers.contributes(division) and taken is not None:
            self.writers.contribution(taken, division).copied(self._reserve, self.copies.complete)

    def _check_space(self, taken: Future[Snapshot]) -> None:
        try:
            snapshot = taken.result()
        except OSError:
            return  # the first save reports it
        for name, (tree, _) in snapshot.states.items():
            if is_too_large(json.dumps(tree).encode()):
                raise ValueError(f"the state {name!r} holds too long lists for a checkpoint; keep them as tensors")
        size, count = snapshot.nbytes, checkpoints_at_once(self.run) - len(self.committed)
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return  # the first save reports it
        if size * count > free:
            checkpoints = f"{format_count(count, 'more checkpoint')} of {format_size(size)}"
            logger.warning(
                "%s may run out of space: %s take %s, %s are free; set a smaller save_total_limit, or another "
                "output_dir", self.folder, checkpoints, format_size(size * count), format_size(free),
            )  # fmt: skip

    def _reserve(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._reserving = self._thread.submit(self.copies.reserve, tensors)
        return tensors

    def committed_with(self, new: Committed) -> list[Committed]:
        """Return the run's checkpoints after the next commit, which may replace one of the same step."""
        number, metric = max((each.number for each in self.committed), default=0) + 1, new.metric
        for same in (each for each in self.committed if each.name == new.name):
            number, metric = same.number, same.metric if metric is None else metric
        others = [each for each in self.committed if each.name != new.name]
        return [*others, new._replace(number=number, metric=metric)]

    def _write(
        self,
        contribution: Future[Contribution],
        save: Save,
        division: Division | None,
        committed: list[Committed],
        protect: Collection[str],
    ) -> Outcome:
        args, others = self.run.args, self.writers.contributors(division)[1:]
        limits = Retention(
            args.save_total_limit, args.save_best_limit, args.save_keep_every, bool(args.greater_is_better)
        )
        try:
            save.commit(contribution, self.run.strategy, others, args.max_shard_size, self.confirm)
            self.confirm()
            return Outcome(save.step, prune(self.folder, committed, limits, protect, self.is_own))
        except (OSError, MemoryError) as error:
            return Outcome(save.step, self.committed, str(error) or "no memory")
        finally:
            self._requests.written = True

    def _outcome(self) -> Outcome | None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.result()

    def _kept(self) -> str:
        return f"the newest checkpoint is {self.newest}" if self.committed else "there is no other checkpoint"


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
            planned = max(1, -(-run.total_steps // steps_between(args.save_steps, run.total_steps)))
        elif args.save_strategy == "epoch" and args.max_steps == -1:
            planned = int(-(-args.num_train_epochs // 1))
    if args.save_total_limit is None:
        return planned
    best = args.save_best_limit if args.metric_for_best_model is not None else 0
    for_good = planned // args.save_keep_every if args.save_keep_every else 0
    limit = args.save_total_limit + best + for_good
    return (min(limit, planned) if is_known else limit) + 1

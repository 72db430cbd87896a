"""`AsyncSaver`: commits the checkpoints of a run beside its training, one at a time."""

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
from trainer_kit.checkpoint.format.json_files import is_too_large, readable_size
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.errors import SaveError
from trainer_kit.run import Run

logger = logging.getLogger("trainer_kit")

States = Callable[[list[Committed]], Mapping[str, Any]]
"""Everything but the model's weights by name, for a checkpoint after which these are the run's committed ones."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a save.

    Attributes:
        step: Of the checkpoint.
        committed: The run's checkpoints after it, oldest first.
        error: Why it failed; None where it did not.
    """

    step: int
    committed: list[Committed]
    error: str | None = None


class AsyncSaver:
    """Takes snapshots of a run and writes them, in a thread of the main process, while training goes on.

    Args:
        run: The run.
        is_own: Whether a checkpoint is of this training, asked before it is deleted.
        confirm: Raises where the folder is another training's by now, called before anything changes there.

    Attributes:
        committed: The run's checkpoints, oldest first.
        is_busy: Whether a checkpoint is being written, or nobody has asked what became of it.
        failed: The last save, where it failed.
        failures: How many saves have failed in this start.
        copies: The host's copies of the run.
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
        """The checkpoint that was committed last."""
        return self.folder / self.committed[-1].name if self.committed else None

    def judge(self, name: str, metric: float) -> None:
        """Notes what an evaluation gave for a checkpoint, where there is one of that name."""
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
        """Takes a snapshot of the run as it stands and begins to write it; all processes take part.

        Args:
            model_state: The whole model's tensors by name.
            states: Gives everything else.
            metric: What an evaluation of this step gave.
            protect: Names of checkpoints that retention must leave.

        Raises:
            TypeError: If a state holds something that a checkpoint cannot hold.
            ValueError: If it has a name that cannot be a file's.
        """
        assert not self.is_busy, "one save at a time"
        self.run.strategy.session.set_abort_handler(self.drain)
        self.run.strategy.collectives.on_main(lambda: self._begin(model_state, states, metric, protect))
        self.is_busy = True

    def wait_for_staging(self) -> None:
        """Wait until what a save copies from the device is on the host, so that the optimizer may change it."""
        if self.copies.is_under_way:
            with self.run.ledger.during("saving"):
                self.copies.wait()

    def finish(self) -> Path | None:
        """Waits until the checkpoint is written; all processes take part.

        Returns:
            Its folder; None where it could not be written, of which a warning tells.

        Raises:
            SaveError: If it could not be written and `save_failures="raise"`.
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
        """The error of the last save."""
        assert self.failed is not None
        return SaveError(
            f"the checkpoint of step {self.failed.step} could not be written: {self.failed.error}; {self._kept()}"
        )

    def drain(self) -> None:
        """Lets a save that was begun come to its end, where an error ends the run; nobody else takes part."""
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
        """Frees the memory of the snapshots."""
        self.run.strategy.session.set_abort_handler(None)
        self._thread.shutdown()
        self.copies.free()

    def check_space(self, model_state: Mapping[str, torch.Tensor], states: States) -> None:
        """Warns, with figures, where the disk has no room for the checkpoints to come; all processes take part.

        The host's memory for copies of the state is taken too, beside training.

        Raises:
            TypeError: If a state holds something that a checkpoint cannot hold.
            ValueError: If it has a name that cannot be a file's.
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
            pretrained_files(self.run.model, self.run.processing_class)  # what it refuses is told now
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return  # a save says so when it comes
        if size * count > free:
            logger.warning(
                "%s may run out of space: %d more checkpoints of %s take %s, %s are free; set a smaller "
                "save_total_limit, or another output_dir",
                self.folder, count, readable_size(size), readable_size(size * count), readable_size(free),
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
            self._pending = Future()  # only now: after an error nobody waits for it
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
        """The run's checkpoints after the next commit, which may replace one of the same step (and weights)."""
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
    """Which checkpoints stay, as the arguments say."""
    return Retention(args.save_total_limit, args.save_best_limit, args.save_keep_every, bool(args.greater_is_better))


def checkpoints_at_once(run: Run, planned: int | None = None) -> int:
    """How many checkpoints of this run will be on the disk together at the most, as far as that is known before.

    Args:
        run: Its steps are counted.
        planned: How many it commits in all, where that is known.
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

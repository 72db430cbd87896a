"""`CheckpointManager`: saves the states of a run and restores them."""

from __future__ import annotations

import contextlib
import logging
import math
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint import CHECKPOINT_PREFIX, Committed, read_arguments, read_state, remove_stale_staging
from trainer_kit.checkpoint.async_saver import AsyncSaver, States
from trainer_kit.checkpoint.base_weights import refer_to_base
from trainer_kit.checkpoint.carried_state import CarriedState
from trainer_kit.checkpoint.compatibility import (
    check_same_order,
    check_same_run,
    find_checkpoint,
    fitting_optimizer_state,
    load_scheduler,
    read_judged,
    read_request,
    report_changes,
)
from trainer_kit.checkpoint.earlier_runs import records_of, set_aside
from trainer_kit.checkpoint.format.base_reference import STATE_NAME as BASE_STATE
from trainer_kit.checkpoint.format.discovery import first_valid, is_of_run, read_outline
from trainer_kit.checkpoint.format.disk import make_writable_folder
from trainer_kit.checkpoint.format.loading import check_weights, load_weights
from trainer_kit.checkpoint.format.trainer_state import (
    CARRIED_STATE,
    read_committed,
    read_data_state,
    read_ledger,
    read_means,
)
from trainer_kit.checkpoint.generations import give_up_copies
from trainer_kit.checkpoint.integrity import check_resumable, fetch_verified
from trainer_kit.checkpoint.recovery import newest_step, recover
from trainer_kit.checkpoint.shared_checks import CheckFiles, find_on_main
from trainer_kit.checkpoint.stateful_entries import StatefulEntries, check_stateful
from trainer_kit.checkpoint.user_states import (
    check_optimizer_storable,
    taken_optimizer_state,
)
from trainer_kit.config import environment
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import TrainLoader
from trainer_kit.data.run_length import RunLength, make_plan
from trainer_kit.data.source import data_length, data_source, order_facts
from trainer_kit.errors import CutOffError
from trainer_kit.optim import Schedule
from trainer_kit.run import Run
from trainer_kit.utils import run_log
from trainer_kit.utils.run_lock import RunLock, ended_holder
from trainer_kit.utils.user_warnings import warn

logger = logging.getLogger("trainer_kit")


class CheckpointManager:
    """The checkpoints of one training, across restarts.

    Args:
        run: The run to save and restore.
        events: The run's callbacks, whose states are saved too.

    Attributes:
        run_id: ID shared by all starts of this training; retention deletes only checkpoints with it.
        data_state: State of an iterable dataset, or of a sampler; None for other datasets.
        shifts_labels: Whether the model shifts labels, as `LossProbe` found; None if unknown.
        resumed_from: The checkpoint that this start resumes from; None for a new training.
        source: `resumed_from`, or a copy that this process can read.
        saver: Writer of the checkpoints.
        copier: Copies the state to memory; None: it is not copied.
        carried: What the model carries from batch to batch.
        stateful: The user's own objects.
        lock: Lock of the output folder, held on the main process.
        has_taken_folder: Whether this is the main process and has taken in what was in the folder.
        metric: Step and value of `metric_for_best_model` in the last evaluation; None before the first.
    """

    def __init__(self, run: Run, events: CallbackList) -> None:
        self.run = run
        self.events = events
        self.folder = Path(run.args.output_dir)
        self.run_id = uuid.uuid4().hex
        self.data_state: dict[str, Any] | None = None
        self.shifts_labels: bool | None = None
        self.resumed_from: Path | None = None
        self.lock = RunLock(self.folder)
        self.saver = AsyncSaver(run, self.is_of_this_run, self.lock.confirm)
        self.copier = None
        if run.copies_folder is not None:
            from trainer_kit.checkpoint.peer_copies import PeerCopier  # imports all that processes communicate by

            self.copier = PeerCopier(self.saver, run.copies_folder)
        self.metric: tuple[int, float] | None = None
        self.has_taken_folder = self._starts_again = False  # the latter: whether the caller requested a resume
        self._plan: RunLength | None = None
        self._made: list[Path] = []  # folders that this start created
        self.source: Path | None = None
        self._earlier: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None  # the plan and arguments in it
        self.carried = CarriedState(run)
        self.stateful = StatefulEntries(run)

    @property
    def plan(self) -> RunLength:
        """The plan of the run's steps, from the last `lay_out`."""
        assert self._plan is not None
        return self._plan

    @property
    def earlier_plan(self) -> Mapping[str, Any] | None:
        """State of the plan in the checkpoint to resume from; None without one."""
        return None if self._earlier is None else self._earlier[0]

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint; None before the first."""
        return self.saver.newest

    @property
    def best(self) -> Path | None:
        """Checkpoint of the best evaluation, possibly in the folder resumed from; None before any evaluation."""
        step = self.run.state.best_step
        if step is None:
            return None
        here = self.folder / f"{CHECKPOINT_PREFIX}{step}"
        if self.resumed_from is None or here.is_dir():
            return here
        return self.resumed_from.with_name(here.name)

    def lock_folder(self) -> None:
        """Create and lock the folder for this membership of the run, before any other write there. Collective.

        Raises:
            FolderInUseError: If another training holds the folder.
            CutOffError: If another membership of this elastic run owns the folder.
            ValueError: If the folder cannot be written.
        """
        collectives = self.run.strategy.collectives
        if environment.is_elastic():  # the last main process may have been killed on any of the machines
            self.lock.known_dead = set(filter(None, collectives.gather_object(ended_holder(self.folder))))
        with self.run.strategy.session.reporting_claim():
            collectives.on_main(self._lock_folder)

    def find(self, request: bool | str | Path | None) -> None:
        """Find the requested checkpoint and restore its counters. Collective.

        Called before the schedule is created, whose length depends on the counters. Unless the folder is locked, no
        file changes.

        Args:
            request: True for the newest checkpoint, or the folder of a checkpoint or run; None or False: no resume.

        Raises:
            ValueError: If there is no such checkpoint, or it has another dataset, seed or optimizer.
        """
        run = self.run
        if environment.is_newcomer():  # it gets its state from those that it joins
            return
        self._starts_again = bool(request := read_request(request))
        if request is True and self.copier is not None and run.strategy.collectives.on_main(lambda: self.lock.is_held):
            self.resumed_from = self._find_or_recover(self.copier.root)
        elif request:
            self.resumed_from = self._find(request)
        if self.resumed_from is None:
            return
        self.source = fetch_verified(run.strategy, self.resumed_from)
        arguments = read_arguments(self.source)
        trainer = read_judged(run.args, arguments, self.source)
        self.data_state = read_data_state(self.source)
        self._earlier = (trainer["plan"], arguments)
        check_same_run(run, trainer, self.data_state, self.resumed_from)
        check_same_order(run, trainer, self.resumed_from)
        run.state.load_state_dict(trainer["counters"])
        run.requests.evaluate = trainer["evaluate"]
        self.run_id = trainer["run_id"]
        self.shifts_labels = trainer["shifts_labels"]
        self.saver.committed = run.strategy.collectives.on_main(lambda: self._of_earlier_starts(trainer))

    def _find(self, request: bool | str | Path) -> Path | None:
        repair = self.lock.is_held
        return find_on_main(
            self.run.strategy, lambda check: find_checkpoint(self.folder, request, repair, partial(self._check, check))
        )

    def _find_or_recover(self, root: Path) -> Path | None:
        """Return the newest checkpoint, or newer copies in memory, which become one. Collective."""
        strategy = self.run.strategy
        newest = strategy.collectives.on_main(lambda: newest_step(self.folder))
        recover(strategy, self.folder, root, newest, self.lock.confirm)
        found = self._find(True)
        step = None if found is None else int(found.name.removeprefix(CHECKPOINT_PREFIX))
        if newest is None or (step is not None and step >= newest):
            return found
        # The newest checkpoints are damaged, and copies may be newer than the one that is valid.
        return found if recover(strategy, self.folder, root, step, self.lock.confirm) is None else self._find(True)

    def lay_out(self, loader: TrainLoader | StreamLoader) -> None:
        """Adapt the loader and the run's counters to each other, and compute `plan`, on which the schedule depends."""
        run = self.run
        loader.passed_over = run.state.passed_over
        epoch = run.state.epoch
        self.data_state = loader.resume(epoch, run.state.position, self.data_state)
        run.state.enter_epochs_of(loader.length_of(epoch))
        if run.state.epoch != epoch:
            self.data_state = loader.state_after(epoch, self.data_state)
        self._plan = make_plan(run, loader, self._earlier)
        run.total_steps, run.total_epochs = self._plan.last_step, self._plan.epochs

    def lay_out_again(self, loader: TrainLoader | StreamLoader, plan: Mapping[str, Any]) -> None:
        """Continue with a plan and another number of processes, as a resume does, and log what changes."""
        self._earlier = (plan, self.run.args.to_dict())
        self.lay_out(loader)
        report_changes(self.run, self.plan, self._earlier)

    def restore(self) -> None:
        """Restore weights, optimizer, schedule, precision, callbacks and the user's own stateful objects. Collective.

        Files of other runs in the folder are moved to `earlier-N/`.

        Raises:
            TypeError: If the optimizer's state holds a value that a checkpoint cannot hold.
            ValueError: If the checkpoint has another model, optimizer or schedule, the folder cannot be written, or
                the optimizer's state cannot be saved and loaded.
        """
        run, directory = self.run, self.source
        assert run.optimizer is not None
        check_optimizer_storable(run.optimizer, run.args)
        if directory is not None:
            self._load(directory)
            assert self.resumed_from is not None
            ledger, log = read_ledger(directory), self.resumed_from.with_name(run_log.NAME)
            work = run.strategy.collectives.on_main(lambda: run_log.logged_after(log, ledger["time"], run.state.step))
            run.ledger.go_on(ledger, *work)
            if isinstance(run.lr_scheduler, Schedule):
                run.lr_scheduler.go_on_at(self.plan.schedule_step)
            logger.info("resumed from %s at step %d of %d", self.resumed_from, run.state.step, run.total_steps)
            assert self._earlier is not None
            report_changes(run, self.plan, self._earlier)
        self.run_id = run.strategy.collectives.broadcast(self.run_id)  # any process may become the main one
        if environment.is_newcomer():  # the folder belongs to those that it joins
            return
        if self.copier is not None:
            self.copier.open()
        run.strategy.collectives.on_main(self._take_folder)
        self.saver.base = refer_to_base(run)
        self.saver.writers.ranks = run.strategy.session.find_writers(self.folder)
        run.strategy.session.release_checkpoint_copies()

    def _lock_folder(self) -> None:
        self._made = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        make_writable_folder(self.folder)
        try:
            self.lock.renew(environment.membership())
        except CutOffError:
            raise
        except OSError as error:
            raise ValueError(f"output_dir={str(self.folder)!r} cannot be written: {error}") from error

    def release_folder(self) -> None:
        """Release the folder's lock; remove folders that a refused start created."""
        self.lock.release()
        with contextlib.suppress(OSError):  # it is not empty
            for each in self._made:
                each.rmdir()

    def _take_folder(self) -> None:
        """Remove stale staging folders and set files of other runs aside."""
        remove_stale_staging(self.folder)
        kept = {each.name for each in self.saver.committed}
        comes_from = self.folder if self.resumed_from is None else self.resumed_from.parent
        goes_on = bool(kept) or (self._starts_again and comes_from.resolve() == self.folder.resolve())
        if self.copier is None:  # copies in memory go out of date
            give_up_copies(self.folder)
        set_aside(self.folder, kept, [] if goes_on else records_of(self.run.args), goes_on)
        self._made = []  # they stay from now on
        self.has_taken_folder = True

    def rollback(self) -> Path | None:
        """Restore the run from its newest valid checkpoint. Collective.

        Returns:
            Folder of the checkpoint; None if there is no valid one.
        """
        run = self.run
        directory = find_on_main(run.strategy, self._newest_valid)
        if directory is None:
            return None
        source = fetch_verified(run.strategy, directory)
        self.metric = None
        if self.copier is not None:
            self.copier.open()
        trainer = read_judged(run.args, read_arguments(source), source)
        run.state.load_state_dict(trainer["counters"])
        run.ledger.go_back(read_ledger(source))
        self.data_state = read_data_state(source)
        self._load(source)
        run.strategy.session.release_checkpoint_copies()
        return directory

    def _load(self, directory: Path) -> None:
        run = self.run
        assert run.optimizer is not None
        check_weights(run.model, directory)  # before anything is written
        placement = run.strategy.sharding.placement
        optimizer = fitting_optimizer_state(run, directory, placement)
        self._load_weights(directory, is_verified=True)
        run.strategy.load_optimizer_state(run.optimizer, optimizer)
        load_scheduler(run, directory)
        if run.strategy.precision is not None:
            run.strategy.precision.load_state_dict(read_state(directory, "precision") or {})
        self.events.load_state_dict(read_state(directory, "callbacks") or {})
        run.means.load_state_dict(read_means(directory))
        self.stateful.restore(directory)
        self.carried.load(directory, self.plan)

    def _load_weights(self, directory: Path, is_verified: bool) -> None:
        strategy = self.run.strategy
        load_weights(
            self.run.model,
            directory,
            is_verified=is_verified,
            load_state=strategy.load_model_state,
            placement=strategy.sharding.placement,
            whole_tensors=strategy.sharding.whole_tensors,
        )

    def begin_save(self, model_state: Mapping[str, torch.Tensor], evaluation_is_due: bool = False) -> None:
        """Begin to write a checkpoint of the run, see `AsyncSaver.begin`. Collective.

        Args:
            model_state: All tensors of the model by name.
            evaluation_is_due: Whether a resume must begin with an interrupted evaluation.
        """
        protect = {each.name for each in (self.resumed_from, self.best) if each is not None}
        states = self._states_with(evaluation_is_due, self.carried.gathered())
        self.saver.begin(model_state, states, self._present_metric(), protect)

    def begin_copy(self, model_state: Mapping[str, torch.Tensor], evaluation_is_due: bool = False) -> None:
        """Begin to copy the run to memory, see `PeerCopier.begin` and `begin_save`. Collective."""
        assert self.copier is not None
        states = self._states_with(evaluation_is_due, self.carried.gathered())
        self.copier.begin(model_state, states, self._present_metric())

    def _present_metric(self) -> float | None:
        return self.metric[1] if self.metric is not None and self.metric[0] == self.run.state.step else None

    def _newest_valid(self, check_files: CheckFiles) -> Path | None:
        there = [self.folder / each.name for each in reversed(self.saver.committed)]
        there += [self.resumed_from] if self.resumed_from is not None else []
        return first_valid(there, logger.warning, partial(self._check, check_files))

    def _check(self, check_files: CheckFiles, directory: Path) -> None:
        check_resumable(self.run, directory, check_files)
        self.events.check_state_dict(read_outline(directory, "callbacks") or {}, directory)

    def record_metric(self, metric: float) -> None:
        """Record the metric of an evaluation at this step, and update the best metric.

        The checkpoint of the step may exist already, if a resume repeats an interrupted evaluation.
        """
        state, best = self.run.state, self.run.state.best_metric
        self.metric = state.step, metric
        self.saver.judge(f"{CHECKPOINT_PREFIX}{state.step}", metric)
        is_better = best is None or (metric > best if self.run.args.greater_is_better else metric < best)
        if is_better and not math.isnan(metric):
            state.best_metric, state.best_step = metric, state.step

    def check_space(self, model_state: Mapping[str, torch.Tensor]) -> None:
        """Warn if the disk lacks space for the planned checkpoints, see `AsyncSaver.check_space`. Collective."""
        self.saver.check_space(model_state, self._states_with(False, {CARRIED_STATE: [self.carried.own()]}))

    def load_best(self) -> None:
        """Load the best checkpoint's weights into the model; warn if there is none. Collective."""
        strategy = self.run.strategy
        best, is_there = strategy.collectives.on_main(lambda: (self.best, self.best is not None and self.best.is_dir()))
        if best is None or not is_there:
            why = "no evaluation gave a best one" if best is None else f"the best checkpoint, {best}, is not there"
            warn(f"load_best_model_at_end=True, but {why}: the model stays as it is")
            return
        self._load_weights(strategy.session.fetch_checkpoint(best), is_verified=False)
        strategy.session.release_checkpoint_copies()
        logger.info("loaded the best model, %s (%s)", best, self.run.state.best_metric)

    def _states_with(self, evaluation_is_due: bool, carried: dict[str, Any]) -> States:
        optimizer_state = taken_optimizer_state(self.run)
        if not (self.run.strategy.is_main or self.run.strategy.sharding.is_active):
            return lambda committed: {"optimizer": optimizer_state()}
        return lambda committed: self.states(committed, optimizer_state(), evaluation_is_due) | carried

    def states(
        self, committed: list[Committed], optimizer_state: dict[str, Any], evaluation_is_due: bool
    ) -> dict[str, Any]:
        """Return all states but the model's weights; `committed` are the run's checkpoints with this one."""
        run = self.run
        check_stateful(run)
        states: dict[str, Any] = {
            "trainer": {
                "counters": run.state.state_dict(),
                "evaluate": evaluation_is_due,
                "run_id": self.run_id,
                "committed": [[each.name, each.number, each.metric] for each in committed],
                "shifts_labels": self.shifts_labels,
                "plan": self.plan.state_dict(),
                "dataset_length": data_length(run.train_dataset),
                **order_facts(data_source("train_dataset", run.train_dataset, run.train_sampler), run.args),
                "seed": run.args.seed,
                "optimizer": type(run.optimizer).__name__,
                "lr_scheduler": type(run.lr_scheduler).__name__,
            },
            "callbacks": self.events.state_dict(),
            "data": self.data_state,
            "ledger": run.ledger.state_dict(),
        }
        states |= {"optimizer": optimizer_state, "lr_scheduler": run.lr_scheduler.state_dict()}
        if run.strategy.precision is not None:
            states["precision"] = run.strategy.precision.state_dict()
        if run.means.sums:
            states["log_means"] = run.means.state_dict()
        if self.saver.base is not None:
            states[BASE_STATE] = self.saver.base.current.to_state()
        return states | {name: entry.state_dict() for name, entry in run.stateful.items()}

    def _of_earlier_starts(self, trainer: Mapping[str, Any]) -> list[Committed]:
        """Return the existing checkpoints of this training, up to the step at which it resumes."""
        assert self.resumed_from is not None
        known = [each for each in read_committed(trainer) if (self.folder / each.name).is_dir()]
        is_own = self.resumed_from.parent.resolve() == self.folder.resolve()
        return [each for each in known if is_own or self.is_of_this_run(self.folder / each.name)]

    def close_copier(self, is_complete: bool) -> None:
        """End the copies in memory; those of a complete run are removed."""
        if self.copier is not None:
            self.copier.close(is_complete)

    def is_of_this_run(self, directory: Path) -> bool:
        return is_of_run(directory, "trainer", self.run_id)

"""`TrainingLoop`: the steps of a training, and the logs, evaluations and checkpoints between them."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.user_states import check_optimizer_storable
from trainer_kit.config.event_schedule import Event, EventSchedule
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import GlobalBatch, TrainLoader
from trainer_kit.errors import EvaluationInterrupted, LostProcessError, NonFiniteError
from trainer_kit.loop.best_metric import BestMetric
from trainer_kit.loop.evaluation_loop import EvaluationLoop
from trainer_kit.loop.lr_schedule import make_run_scheduler
from trainer_kit.loop.memberships import closing_line, note_start
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.loop.regrouping import NewcomersReadyError, Regrouping
from trainer_kit.loop.replicas import Replicas
from trainer_kit.loop.step_metrics import StepMetrics, StepSpan
from trainer_kit.loop.summary import Beginning, summarize
from trainer_kit.loop.train_step import TrainStep
from trainer_kit.loss.means import without_metrics
from trainer_kit.loss.outside_modules import OutsideModules
from trainer_kit.optim import check_all_known
from trainer_kit.run import TrainOutput
from trainer_kit.strategies.activation_checkpointing import warn_of_unused_checkpointing
from trainer_kit.utils.schedule_free import averaged_weights, set_training
from trainer_kit.utils.streams import warn_of_failed_streams

logger = logging.getLogger("trainer_kit")

_MAX_UNREAD_STEPS = 1000
"""Steps after which losses are read from the device even if no record is due, to bound their memory."""


class TrainingLoop:
    """The loop that trains a run from its current step to its end. Use an instance once.

    After each step it serves the requests of callbacks and arguments on all ranks: log, evaluate, save, stop.

    Args:
        evaluation: Evaluates the run's model. Its run is set up, with the state of a checkpoint restored.
        loader: The loader of the training batches.
        step: Takes the optimizer steps.
        checkpoints: The checkpoint manager of the training.
        sync: Shares the ranks' requests.
        regrouping: Lets the training continue when other processes are lost or join.
    """

    def __init__(
        self,
        evaluation: EvaluationLoop,
        loader: TrainLoader | StreamLoader,
        step: TrainStep,
        checkpoints: CheckpointManager,
        sync: RankSync,
        regrouping: Regrouping,
    ) -> None:
        from trainer_kit.debugging.crash_dump import CrashDump  # takes 3 ms

        self.run, self.args = evaluation.run, evaluation.run.args
        self.events, self.loss = evaluation.events, evaluation.probe.loss
        self.loader, self.checkpoints = loader, checkpoints
        self.crash_dump = CrashDump(self.run, self.loss, loader)
        self._evaluation, self._step = evaluation, step
        self._sync = sync
        self._regrouping = regrouping
        self._schedule = EventSchedule(self.args)
        self._metrics, self._replicas = StepMetrics(self.run), Replicas(self.run)
        self._beginning = Beginning(self.run)
        self._is_stopping = self._has_checked_step = False
        self._known = {name for name, _ in self.run.model.named_parameters()}
        self._outside = OutsideModules(self.loss.compute_loss if self.run.strategy.is_main else None, self.run.model)
        self._saved_step: int | None = None  # step of the newest checkpoint of this start
        self._best = BestMetric(checkpoints)

    @property
    def exit_code(self) -> int | None:
        """The exit code requested by a signal to any rank; None without a signal."""
        return self._sync.pending.exit_code

    def begin(self) -> None:
        """Call `on_train_begin` and start the clock."""
        note_start(self.run)
        self.events.call("on_train_begin", self.run)
        self.checkpoints.stateful.begin()
        self._beginning = Beginning(self.run)
        self.run.ledger.enter("loop")

    def take_steps(self) -> None:
        """Train to the last step; with `nonfinite="rollback"`, return to a checkpoint after a non-finite step.

        Raises:
            NonFiniteError: If the loss or a gradient is not finite and `nonfinite="stop"`, or with "rollback" if
                there is no checkpoint or no rollback left.
            LostProcessError: If another process was lost, and this one cannot continue without it.
        """
        run, state = self.run, self.run.state
        starts = state.step == 0 and self.checkpoints.resumed_from is None
        run.requests.evaluate = run.requests.evaluate or (self.args.eval_on_start and starts)
        bad: NonFiniteError | None = None
        end: LostProcessError | NewcomersReadyError | None = None
        if self._regrouping.is_newcomer:
            end = NewcomersReadyError("this process joins the others")
        while True:
            if end is not None:  # here the frames are left that hold the last group
                self._regroup(end)
            has_regrouped, end = end is not None, None
            group = self._step.group = self._regrouping.group
            try:
                with self._regrouping.expected(group):
                    self._open(has_regrouped, bad)
                    bad = None
                    in_epoch = False
                    while state.step < run.total_steps and not self._is_stopping:
                        if self._sync.pending.join:
                            self._let_others_join()
                            continue  # they cannot
                        if not in_epoch:
                            self.events.call("on_epoch_begin", run)
                            self._step.prefetch()
                        global_batch = self._step.run()
                        in_epoch = not global_batch.closes_epoch
                        self._end_step(global_batch)
                    self._read_metrics()
                return
            except NonFiniteError as error:
                if error is bad:  # the run cannot go back
                    raise
                bad = error
            except (LostProcessError, NewcomersReadyError) as error:
                bad, end = None, error

    def finish(self) -> TrainOutput:
        """Summarize the training, serve the remaining requests, and wait for the last checkpoint.

        Returns:
            The result of the training.

        Raises:
            SaveError: If the last checkpoint could not be written.
        """
        run, sync, saver = self.run, self._sync, self.checkpoints.saver
        seconds = self._beginning.seconds()
        self._finish_save()  # on_save comes before the final metrics
        self._read_metrics()
        if self._saved_step != run.state.step:
            self._replicas.warn_if_different()
        output = summarize(run, self.events, self._beginning, seconds)
        closing = closing_line(run) if self.exit_code is None else None
        self.events.call("on_train_end", run, output.metrics if self.exit_code is None else None)
        sync.sync()
        self._handle_requests()
        self._finish_save()
        set_training(run.optimizer, False)
        if self.args.load_best_model_at_end and self.exit_code is None:
            self.checkpoints.load_best()
        sync.sync()  # shares a signal that arrived in the meantime
        saver.close()
        self.checkpoints.close_copier(is_complete=not saver.failed)
        if saver.failed and self.exit_code is None:
            raise saver.error()
        warn_of_failed_streams()
        if closing is not None:
            logger.info("%s", closing)
        self.events.call("on_exit", run)
        sync.sync()
        return output

    def abort(self, error: BaseException) -> None:
        """Wait for the pending save after an error, and write a crash dump. Not collective."""
        saver = self.checkpoints.saver
        saver.drain()
        self.checkpoints.close_copier(is_complete=False)
        saver.close()
        self.crash_dump.write(error, saver.newest, self._step.micro_batch, self._step.is_fetching)

    def close(self) -> None:
        """Release the prefetched batches, the loader's workers, copies on the device, and connections."""
        self._regrouping.close()
        self._step.close()
        self._sync.close()
        self.run.requests.exit_code = None

    def leave(self) -> NoReturn:
        """Log the step at which a signal ended the training and the newest checkpoint, and leave the process."""
        run, saver = self.run, self.checkpoints.saver
        kept = f"; the newest checkpoint is {saver.newest}" if saver.newest else ""
        if saver.failed:
            kept = f", but {saver.error()}"
        logger.warning(
            "left at step %d of %d%s; train(resume_from_checkpoint=True) resumes", run.state.step, run.total_steps, kept
        )
        if run.requests.signal is not None:
            signal.raise_signal(run.requests.signal)
        raise SystemExit(self.exit_code)

    # Steps

    def _end_step(self, global_batch: GlobalBatch) -> None:
        """Record the step, and serve the requests of callbacks and arguments."""
        run, call = self.run, self.events.call
        self._record_step(global_batch)
        requests, schedule, step = run.requests, self._schedule, run.state.step
        requests.log = requests.log or schedule.is_due_after_step("log", step, run.total_steps)
        requests.evaluate = requests.evaluate or schedule.is_due_after_step("evaluate", step, run.total_steps)
        if is_last := step == run.total_steps:
            self._request(schedule.is_due_at_end)
        call("on_step_end", run)
        if not self._has_checked_step:
            self._check_first_step()
        if self._regrouping.is_open:
            self._regrouping.look_for_newcomers()
        if global_batch.closes_epoch:
            self._request(schedule.is_due_after_epoch)
            call("on_epoch_end", run)
        self._step.has_changed_weights = False
        is_between = global_batch.closes_epoch or is_last  # on_epoch_begin may change the dataset before the next fetch
        if self._sync.sync() if is_between else self._step.prefetch():
            self._handle_requests()
        elif self._metrics.unread >= _MAX_UNREAD_STEPS:
            self._read_metrics()

    def _check_first_step(self) -> None:
        """Check what a step may have created, parameters and the optimizer's state, and what it has not called."""
        run, self._has_checked_step = self.run, True
        assert run.optimizer is not None
        check_all_known(run.optimizer, run.model, self._known)
        saved = [self.events, *run.stateful.values()] if self.args.save_strategy != "no" else None
        if run.strategy.is_main:
            if run.strategy.device_info.compilations()[0] == 0:  # what compiled code calls is not known
                warn_of_unused_checkpointing(run.model)
            self._outside.warn(run.optimizer, run.strategy.parameter_names(run.model), saved)
        if saved is not None:
            check_optimizer_storable(run.optimizer, self.args)
            with averaged_weights(run.optimizer):  # as in a save
                self.checkpoints.check_space(run.strategy.model_state(self.loss.model))

    def _record_step(self, global_batch: GlobalBatch) -> None:
        """Keep loss and gradient norms of the finished step for a record."""
        # Without valid labels, a step has no loss, rather than one of zero. Counts on a device are not read here.
        items = self.loss.items(global_batch)
        span = StepSpan(self.run.state.step, global_batch.epoch, global_batch.start, global_batch.stop)
        self._metrics.append(span, not isinstance(items, int) or items > 0)

    def _request(self, is_due: Callable[[Event], bool]) -> None:
        """Request the events that the arguments schedule; `Checkpointing` requests the saves."""
        requests = self.run.requests
        requests.log = requests.log or is_due("log")
        requests.evaluate = requests.evaluate or is_due("evaluate")

    def _open(self, has_regrouped: bool, bad: NonFiniteError | None) -> None:
        """Begin or continue training; after a non-finite step, from a checkpoint."""
        if bad is not None:
            self._roll_back(bad)
        elif has_regrouped:
            self._metrics.drop_losses(lambda: self.checkpoints.newest)
        self._sync.open(self.events.may_request_late)
        # The checkpoint may hold an interrupted evaluation, or a callback may request a stop.
        if self._sync.sync():
            self._handle_requests()

    def _roll_back(self, error: NonFiniteError) -> None:
        """Restore the newest checkpoint, and skip the samples of the non-finite step from now on.

        Raises:
            NonFiniteError: `error`, if that is not possible.
        """
        run = self.run
        self._finish_save()
        if run.args.nonfinite != "rollback" or run.state.rollbacks >= run.args.max_rollbacks or error.span is None:
            raise error
        bad, done, passed_over = error.span, run.state.rollbacks, run.state.passed_over
        found = run.state.micro_batch, run.state.eval_batch
        self._regrouping.is_whole = False
        directory = self.checkpoints.rollback()
        if directory is None:
            raise error
        run.state.rollbacks, (run.state.micro_batch, run.state.eval_batch) = done + 1, found
        run.state.passed_over = [*passed_over, bad[1:]]
        self.checkpoints.lay_out(self.loader)
        set_training(run.optimizer, True)
        is_plateau = isinstance(run.lr_scheduler, ReduceLROnPlateau)
        if not (self._regrouping.has_own_scheduler or is_plateau):  # skipping samples changes the number of steps
            run.lr_scheduler = make_run_scheduler(run, self.checkpoints.plan)
        self._metrics.forget()
        for each in (self._sync.pending, run.requests):
            each.log = each.evaluate = each.save = False
        self._step.open_data()
        logger.warning(
            "went back to %s (%d of %d times): %s", directory, run.state.rollbacks, run.args.max_rollbacks, error
        )
        self.events.call("on_rollback", run, directory)
        if run.state.step == run.total_steps:
            self._request(self._schedule.is_due_at_end)
        epoch, position = run.state.epoch, run.state.position
        if position and self.loader.epoch_length and not self.loader.steps_left(epoch, position):
            self._step.leave_epoch()
            self._request(self._schedule.is_due_after_epoch)
            self.events.call("on_epoch_end", run)
        self._count_served()

    def _let_others_join(self) -> None:
        """End this membership between two steps, for one with newcomers; leave the run if they cannot join any more."""
        self._finish_save()
        if not self._regrouping.can_be_joined():
            self._sync.pending.join = False
            self._sync.sync()
            self._handle_requests()
            return
        self._read_metrics()  # newcomers have no part of them
        self._count_served()
        with contextlib.suppress(LostProcessError):  # another process has left already
            self.run.strategy.barrier()
        raise NewcomersReadyError("others are ready to join")

    def _regroup(self, end: LostProcessError | NewcomersReadyError) -> None:
        """Continue after a loss of other processes with those that are left, or with those that join."""
        run, parts, old = self.run, self._regrouping, self._step
        parts.is_whole = parts.is_whole and not old.has_changed_weights
        step_begun = None
        if old.ledger_place is not None:
            run.ledger.lose(old.ledger_place)
            step_begun = run.state.step + 1
        self._sync.hand_back()
        self._sync.close()
        old.close()
        is_newcomer = parts.is_newcomer
        self.loader = self.crash_dump.loader = parts.go_on(end, step_begun)
        if is_newcomer:
            self._beginning = Beginning(run)
        self._saved_step = None  # the save may have been given up
        self._best.forget_records()  # as in those that have joined
        self._has_checked_step = False
        self._sync = RankSync(run)
        self._step = TrainStep(run, self.events, self._evaluation.probe, self.loader, self.checkpoints, self._sync)

    # Between steps

    def _handle_requests(self) -> None:
        """Serve the ranks' requests in a fixed order; evaluation precedes save, so that checkpoints hold its result."""
        self.checkpoints.lock.check()
        run, pending, sync = self.run, self._sync.pending, self._sync.sync
        if pending.written:
            self._finish_save()
            if not (pending.log or pending.evaluate or pending.save or pending.copy or pending.stop):
                return  # without waiting for the device
        self._read_metrics()
        self._count_served()
        if pending.log:
            self._log()
            pending.log = False
            self._count_served()
            sync()  # requests made in on_log
        if pending.evaluate and run.eval_dataset is None:
            pending.evaluate = False
        if pending.evaluate and pending.exit_code is None:
            try:
                self._evaluate()
                pending.evaluate = False
                self._count_served()
            except EvaluationInterrupted:
                logger.info("the evaluation at step %d was broken off; a resume begins with it", run.state.step)
            sync()
        if pending.save or pending.copy:
            self._save_or_copy()
        if pending.stop:
            pending.stop, self._is_stopping = False, True

    def _count_served(self) -> None:
        self._regrouping.is_whole, self._regrouping.served = True, self._regrouping.served + 1

    def _read_metrics(self) -> None:
        self._metrics.read(self._newest_checkpoint)

    def _newest_checkpoint(self) -> Path | None:
        self._finish_save()
        return self.checkpoints.newest

    def _log(self) -> None:
        with self.run.ledger.during("logging"):
            warn_of_failed_streams()
            given, own = self.events.metrics(self.run), self._metrics.record()
            own = without_metrics(own, given, self.loss.log.called)
            record = own | given
            self.events.call("on_log", self.run, record)
            self._best.note_record(record, own)

    def _evaluate(self) -> None:
        """Evaluate, and pass the metrics to callbacks, checkpoint manager and schedule."""
        run, best = self.run, self._best
        metrics = self._evaluation.evaluate(run.eval_dataset, "eval")
        if best.is_missing(metrics):
            if best.needs_record:
                self._log()
            best.add_from_record(metrics)
        self._regrouping.is_whole = False  # callbacks have heard of it on some processes, but not on all
        self.events.call_evaluation(run, metrics, lambda: best.judge(metrics))

    def _save_or_copy(self) -> None:
        """Begin to save if that is requested; else begin to copy, unless a save or a copy is under way."""
        pending, saver, copier = self._sync.pending, self.checkpoints.saver, self.checkpoints.copier
        if pending.save:
            # A rank that exits requests a checkpoint, which may exist already.
            if pending.exit_code is None or self._saved_step != self.run.state.step:
                self._save()
            pending.save = False
            self._count_served()
            self._sync.sync()
        elif copier is not None and not (saver.is_busy or copier.is_busy):
            with self.run.ledger.during("saving"), averaged_weights(self.run.optimizer, saver.wait_for_staging):
                state = self.run.strategy.model_state(self.loss.model)
                self.checkpoints.begin_copy(state, evaluation_is_due=pending.evaluate)
        pending.copy = False

    def _save(self) -> None:
        self._finish_save()  # one save at a time
        self._replicas.warn_if_different()
        with self.run.ledger.during("saving"):
            saver = self.checkpoints.saver
            with averaged_weights(self.run.optimizer, saver.wait_for_staging):
                state = self.run.strategy.model_state(self.loss.model)
                self.checkpoints.begin_save(state, evaluation_is_due=self._sync.pending.evaluate)
        self._saved_step = self.run.state.step
        if not self.args.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the pending save or copy, if there is one, and call `on_save`."""
        self._sync.pending.written = False
        copier = self.checkpoints.copier
        if copier is not None and copier.is_busy:
            with self.run.ledger.during("saving"):
                copier.finish(gives_up=self._sync.pending.exit_code is not None)
        if not self.checkpoints.saver.is_busy:
            return
        with self.run.ledger.during("saving"):
            directory = self.checkpoints.saver.finish()
            if directory is not None:
                self.events.call("on_save", self.run, directory)
            else:
                self._saved_step = None

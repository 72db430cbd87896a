"""`Regrouping`: a training that goes on in its processes after others were lost."""

from __future__ import annotations

import logging
import time
import traceback
from pathlib import Path

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint import CHECKPOINT_PREFIX, Committed
from trainer_kit.checkpoint.healing import Progress, heal
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.takeover import take_over
from trainer_kit.config import environment
from trainer_kit.data.build import make_train_loader
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
from trainer_kit.errors import LostProcessError
from trainer_kit.loop.lr_schedule import make_run_scheduler
from trainer_kit.loop.memberships import note_regroup
from trainer_kit.loss.loss import Loss
from trainer_kit.profiling.time_ledger import REGROUP
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.utils.new_place import ask_for_place
from trainer_kit.utils.schedule_free import set_training
from trainer_kit.utils.units import format_duration, pluralize

logger = logging.getLogger("trainer_kit")

_ATTEMPTS = 3


class Regrouping:
    """Leaves a broken process group, meets the processes that are left, and gives all of them the newest state.

    Args:
        checkpoints: The checkpoint manager of the training.
        reading: How the training samples are read.
        loader: The loader of the training batches.
        loss: Computes the training loss.
        has_own_scheduler: Whether the user gave the learning rate schedule.

    Attributes:
        is_whole: Whether the state of this process is that of a moment between two steps.
        served: Number of requests that this process has served.
        has_own_scheduler: The argument of the same name.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        reading: LoaderConfig,
        loader: TrainLoader | StreamLoader,
        loss: Loss,
        has_own_scheduler: bool,
    ) -> None:
        self.run = checkpoints.run
        self.events: CallbackList = checkpoints.events
        self.checkpoints = checkpoints
        self.is_whole = True
        self.served = 0
        self._reading = reading
        self._loader = loader
        self._loss = loss
        self.has_own_scheduler = has_own_scheduler
        self._vain_at: int | None = None  # step at which all processes met again though none was lost

    @property
    def is_possible(self) -> bool:
        """Whether this training can go on without the processes that it loses."""
        # A sampler or an iterable dataset would have to return to an earlier position.
        can_be_placed = type(self._loader) is TrainLoader and not self.run.args.auto_find_batch_size
        return self.run.strategy.regroupable is not None and can_be_placed

    def go_on(self, lost: LostProcessError, step_begun: int | None) -> TrainLoader | StreamLoader:
        """Regroup after a loss; return the loader of the batches to come. Collective among those that are left.

        Args:
            lost: What a collective has raised.
            step_begun: Number of the step that was begun and not ended; None between two steps.

        Raises:
            LostProcessError: If new processes have to resume from a checkpoint.
        """
        run, group = self.run, self.run.strategy.regroupable
        if group is None or not self.is_possible or self._vain_at == run.state.step:
            raise lost
        begin = since = time.perf_counter()
        processes = run.strategy.world_size
        run.ledger.enter(REGROUP)
        committed, was_saving = list(self.checkpoints.saver.committed), self.checkpoints.saver.is_busy
        for attempt in range(1, _ATTEMPTS + 1):
            _forget_frames(lost)
            self._meet(group, lost)
            try:
                self._take_over()
                loader = self._set_up(group)
                self._finish_save(committed, was_saving)
                committed, was_saving = list(self.checkpoints.saver.committed), False
                again = int(step_begun is not None and run.state.step < step_begun)
                note_regroup(run, str(lost), time.perf_counter() - since, again)
                since, step_begun = time.perf_counter(), None
                self.events.call("on_regroup", run)
                break
            except LostProcessError as error:  # one more
                lost = error
                if attempt == _ATTEMPTS:
                    raise
        left, seconds = run.strategy.world_size, time.perf_counter() - begin
        self._vain_at = run.state.step if left == processes else None
        logger.info(
            "went on with %s instead of %d at step %d after %s: %s", f"{left} {pluralize('process', left)}", processes,
            run.state.step, format_duration(seconds), lost,
        )  # fmt: skip
        run.ledger.enter("loop")
        return loader

    def _meet(self, group: Regroupable, lost: LostProcessError) -> None:
        """Leave the others, and join those of the next membership."""
        run, membership, folder = self.run, environment.membership(), environment.regroup_folder()
        assert membership is not None
        assert folder is not None
        group.leave_group()
        self.checkpoints.saver.drain(after_loss=True)
        if self.checkpoints.copier is not None:
            self.checkpoints.copier.drain()
        place = ask_for_place(
            Path(folder),
            run.strategy.collectives.local_rank,
            f"{membership.run}/{membership.number}",
            lambda: run.requests.exit_code is not None,
        )
        if place is None:
            raise lost
        environment.take_place(place)
        group.join_group()

    def _take_over(self) -> None:
        """Claim the folder for the new membership, and let its main process take the place of a lost one."""
        run, checkpoints = self.run, self.checkpoints
        if take_over(checkpoints) and run.strategy.is_main:
            logger.setLevel(run.args.log_level.upper())
            logger.warning(
                "this process is the main one now, since the last one is lost: it writes logs and checkpoints to %s",
                checkpoints.folder,
            )

    def _set_up(self, group: Regroupable) -> TrainLoader | StreamLoader:
        """Set the training up again, as a resume does, with the state of the processes instead of a checkpoint's."""
        run, checkpoints = self.run, self.checkpoints
        own = Progress(run.state.step, self.served, self.is_whole)
        group.restore_buffers()
        healed = heal(checkpoints, group, own, self._requests(), self._begin_to_change)
        self.served, self.is_whole = healed.progress.served, True
        if healed.taken:
            run.requests.log, run.requests.evaluate, save, stop = healed.extra
            run.requests.save, run.requests.stop = run.requests.save or save, run.requests.stop or stop
        run.model.zero_grad()
        loader = self._loader = make_train_loader(run, self._reading, saved=checkpoints.plan.state_dict())
        checkpoints.lay_out_again(loader)
        if not (self.has_own_scheduler or isinstance(run.lr_scheduler, ReduceLROnPlateau)):
            run.lr_scheduler = make_run_scheduler(run, checkpoints.plan)
        checkpoints.shifts_labels = self._loss.agree(run.strategy.collectives)  # the probe may have been cut short
        set_training(run.optimizer, True)
        return loader

    def _begin_to_change(self) -> None:
        self.is_whole = False

    def _requests(self) -> tuple[bool, ...]:
        requests = self.run.requests
        return requests.log, requests.evaluate, requests.save, requests.stop

    def _finish_save(self, before: list[Committed], was_saving: bool) -> None:
        """Tell all processes what became of the save that was under way, and prepare the next one. Collective.

        Args:
            before: The checkpoints that this process knew before the loss.
            was_saving: Whether a save was under way in this process.
        """
        run, checkpoints, saver = self.run, self.checkpoints, self.checkpoints.saver
        collectives, session = run.strategy.collectives, run.strategy.session
        saver.committed, saver.failed = collectives.broadcast((saver.committed, saver.failed))
        saver.writers.ranks = session.find_writers(checkpoints.folder)
        if saver.newest is not None and saver.committed != before:
            session.report_saved_step(int(saver.newest.name.removeprefix(CHECKPOINT_PREFIX)))
            self.events.call("on_save", run, saver.newest)
        elif was_saving or (saver.newest is None and before):  # the last main process had a disk of its own
            run.requests.save = True


def _forget_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that failed: they would keep the process group alive."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        each.__cause__, each = None, each.__cause__ or each.__context__
    error.__context__ = None

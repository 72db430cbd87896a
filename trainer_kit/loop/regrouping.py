"""`Regrouping`: a training that continues in its processes when others are lost or join."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import xxhash
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint import CHECKPOINT_PREFIX, Committed
from trainer_kit.checkpoint.base_weights import refer_to_base
from trainer_kit.checkpoint.healing import Healed, Progress, heal
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.takeover import take_over
from trainer_kit.config import environment
from trainer_kit.data.build import make_train_loader
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
from trainer_kit.errors import LostProcessError
from trainer_kit.loop.lr_schedule import make_run_scheduler
from trainer_kit.loop.memberships import note_regroup
from trainer_kit.loop.rank_sync import TOLD_TO_LEAVE, start_facts
from trainer_kit.loss.loss import Loss
from trainer_kit.profiling.time_ledger import REGROUP
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.utils.new_place import NEW, are_joining, ask_for_place, set_open
from trainer_kit.utils.schedule_free import set_training
from trainer_kit.utils.units import format_count, format_duration

logger = logging.getLogger("trainer_kit")

_ATTEMPTS = 3

_numbers = itertools.count(1)  # of the trainings of this program


class NewcomersReadyError(Exception):
    """Others are ready to join: all processes leave their group between two steps, and meet again with them."""


class Regrouping:
    """Leaves a process group, meets the processes of the next one, and gives all of them the newest state.

    That happens after a loss of other processes, and when those of other machines join.

    Args:
        checkpoints: The checkpoint manager of the training.
        reading: How the training samples are read.
        loader: The loader of the training batches.
        loss: Computes the training loss.
        has_own_scheduler: Whether the user gave the learning rate schedule.

    Attributes:
        is_whole: Whether the state of this process is that of a moment between two steps.
        is_open: Whether this is the main process of a training that others can join.
        is_newcomer: Whether this process has prepared the training alone, and has not joined the others yet.
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
        self.is_newcomer = environment.is_newcomer()
        self.is_whole = not self.is_newcomer
        self.served = 0
        self._number = next(_numbers)
        # Now, since the script may change on disk while it runs.
        self._facts = start_facts(self.run) if environment.is_elastic() else {}
        self._folder = Path(environment.regroup_folder() or "")
        self.is_open = False
        self._opened_for: str | None = None
        self._reading = reading
        self._loader = loader
        self._loss = loss
        self.has_own_scheduler = has_own_scheduler
        self._vain_at: int | None = None  # step at which all processes met again though none was lost

    @property
    def is_possible(self) -> bool:
        """Whether this training can continue when processes are lost or join."""
        # A sampler or an iterable dataset would have to return to an earlier position.
        can_be_placed = type(self._loader) is TrainLoader and not self.run.args.auto_find_batch_size
        return self.run.strategy.regroupable is not None and can_be_placed

    @property
    def group(self) -> Regroupable | None:
        """The strategy as one whose processes may be lost or join; None if this training cannot continue then."""
        return self.run.strategy.regroupable if self.is_possible else None

    @property
    def _can_join(self) -> bool:
        """Whether processes can join this training; each has its own folder for copies in memory."""
        return self.is_possible and self.checkpoints.copier is None

    @contextlib.contextmanager
    def expected(self, group: Regroupable | None) -> Iterator[None]:
        """Enclose steps in which processes may be lost and others may join; None: they cannot."""
        if self.run.strategy.is_main and environment.regroup_folder() is not None:
            self._opened_for = self._digest(group) if group is not None and self._can_join else ""
            self.is_open = self._opened_for != ""
            set_open(self._folder, self._opened_for)
        if group is None:
            yield
            return
        group.expect_regroup(True)
        try:
            yield
        finally:
            group.expect_regroup(False)

    def close(self) -> None:
        """Take in no newcomers any more."""
        if self.is_open:
            set_open(self._folder, None)
        self.is_open = False

    def look_for_newcomers(self) -> None:
        """Make the request that they join, if the launcher says that some are ready."""
        if are_joining(self._folder):
            self.run.requests.join = True

    def can_be_joined(self) -> bool:
        """Return whether newcomers can join still; if not, request that all leave, for new processes. Collective."""
        return self.run.strategy.collectives.on_main(self._is_as_opened)

    def _is_as_opened(self) -> bool:
        assert self.group is not None
        if self._digest(self.group) == self._opened_for:
            return True
        self.close()
        logger.warning(
            "others are ready to join, but parameters, buffers or the optimizer are not those that the training began "
            "with: all processes save and end, and new ones resume"
        )
        if self.run.requests.exit_code is None:
            self.run.requests.exit_code = TOLD_TO_LEAVE
        return False

    def go_on(self, end: LostProcessError | NewcomersReadyError, step_begun: int | None) -> TrainLoader | StreamLoader:
        """Regroup; return the loader of the batches to come. Collective among those that continue.

        Args:
            end: What ended the membership: a loss that a collective has raised, or newcomers.
            step_begun: Number of the step that was begun and not ended; None between two steps.

        Raises:
            LostProcessError: If new processes have to resume from a checkpoint.
        """
        run, group = self.run, self.group
        is_vain = isinstance(end, LostProcessError) and self._vain_at == run.state.step
        if not self.is_newcomer and (group is None or is_vain):
            raise end
        waited = end.waited if isinstance(end, LostProcessError) else 0.0
        begin = since = time.perf_counter() - waited
        processes = run.strategy.world_size
        run.ledger.enter_since(waited, REGROUP)
        committed, was_saving = list(self.checkpoints.saver.committed), self.checkpoints.saver.is_busy
        for attempt in range(1, _ATTEMPTS + 1):
            _forget_frames(end)
            group = self._meet(group, end)
            run.requests.join = False
            try:
                self._take_over()
                healed = self._heal(group)
                loader = self._set_up(healed)
                self._finish_save(None if self.is_newcomer else committed, was_saving)
                committed, was_saving, self.is_newcomer = list(self.checkpoints.saver.committed), False, False
                again = int(step_begun is not None and run.state.step < step_begun)
                cause = str(end) if isinstance(end, LostProcessError) else ""
                known = cause, time.perf_counter() - since, again
                note_regroup(run, *run.strategy.collectives.broadcast(known))  # newcomers know less
                since, step_begun = time.perf_counter(), None
                self.events.call("on_regroup", run)
                break
            except LostProcessError as error:  # one more
                end = error
                if attempt == _ATTEMPTS:
                    raise
        left, stood = run.strategy.world_size, format_duration(time.perf_counter() - begin)
        sizes = format_count(left, "process") + (f" instead of {processes}" if left != processes else "")
        if isinstance(end, LostProcessError):
            self._vain_at = run.state.step if left == processes and not healed.joined else None
            logger.info("continued with %s at step %d after %s: %s", sizes, run.state.step, stood, end)
        else:
            what = "others joined" if healed.joined else "none joined"
            logger.info("%s from step %d: %s; the run stood still for %s", sizes, run.state.step, what, stood)
        run.ledger.enter("loop")
        return loader

    def _meet(self, group: Regroupable | None, end: LostProcessError | NewcomersReadyError) -> Regroupable:
        """Leave the others, and join those of the next membership."""
        run, membership, is_new = self.run, environment.membership(), environment.is_newcomer()
        if is_new:
            words = NEW + (self._digest(group) if group is not None and self._can_join else "")
        else:
            assert group is not None
            assert membership is not None
            words = f"{membership.run}/{membership.number}"
            group.leave_group()
            self.checkpoints.saver.drain(after_loss=True)
            if self.checkpoints.copier is not None:
                self.checkpoints.copier.drain()
        number, requests = run.strategy.collectives.local_rank, run.requests
        # Where others join, nothing is lost: the next vote serves a signal.
        stays = isinstance(end, NewcomersReadyError) and not is_new
        place = ask_for_place(self._folder, number, words, lambda: requests.exit_code is not None and not stays)
        if place is None and is_new:
            raise SystemExit(TOLD_TO_LEAVE)
        if place is None:
            raise end if isinstance(end, LostProcessError) else LostProcessError("new processes resume the run")
        assert group is not None, "the launcher gives a place only to those that can join"
        environment.take_place(place)
        group.join_group()
        return group

    def _digest(self, group: Regroupable) -> str:
        """Return a digest of what must be the same in processes that train together."""
        run = self.run
        assert run.optimizer is not None
        facts = [*self._facts.items(), *group.facts(run.model, run.optimizer).items()]
        return xxhash.xxh3_128_hexdigest(repr((self._number, facts)).encode())

    def _take_over(self) -> None:
        """Claim the folder for the new membership, and let its main process take the place of a lost one."""
        run, checkpoints = self.run, self.checkpoints
        if take_over(checkpoints) and run.strategy.is_main:
            logger.setLevel(run.args.log_level.upper())
            logger.warning(
                "this process is the main one now, since the last one is lost: it writes logs and checkpoints to %s",
                checkpoints.folder,
            )

    def _heal(self, group: Regroupable) -> Healed:
        run, checkpoints = self.run, self.checkpoints
        own = Progress(-1, 0, False) if self.is_newcomer else Progress(run.state.step, self.served, self.is_whole)
        group.restore_buffers()
        extra = self._requests(), checkpoints.plan.state_dict()
        healed = heal(checkpoints, group, own, extra, self._begin_to_change)
        self.served, self.is_whole = healed.progress.served, True
        return healed

    def _set_up(self, healed: Healed) -> TrainLoader | StreamLoader:
        """Set the training up again, as a resume does, with the state of the processes instead of a checkpoint's."""
        run, checkpoints = self.run, self.checkpoints
        requests, plan = healed.extra
        if healed.taken:
            run.requests.log, run.requests.evaluate, save, stop = requests
            keeps = not self.is_newcomer  # which has asked for what a new run does
            run.requests.save = save or (keeps and run.requests.save)
            run.requests.stop = stop or (keeps and run.requests.stop)
        if healed.joined:
            checkpoints.saver.base = refer_to_base(run)
        run.model.zero_grad()
        loader = self._loader = make_train_loader(run, self._reading, saved=plan)
        checkpoints.lay_out_again(loader, plan)
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

    def _finish_save(self, before: list[Committed] | None, was_saving: bool) -> None:
        """Tell all processes what became of the save that was under way, and prepare the next one. Collective.

        Args:
            before: The checkpoints that this process knew before; None for one that has just joined.
            was_saving: Whether a save was under way in this process.
        """
        run, checkpoints, saver = self.run, self.checkpoints, self.checkpoints.saver
        collectives, session = run.strategy.collectives, run.strategy.session
        saver.committed, saver.failed = collectives.broadcast((saver.committed, saver.failed))
        saver.writers.ranks = session.find_writers(checkpoints.folder)
        known = before[-1].number if before else 0
        newest = saver.committed[-1].number if saver.committed else 0
        if newest > known:
            session.report_saved_step(int(saver.committed[-1].name.removeprefix(CHECKPOINT_PREFIX)))
        # On all, though some may have heard of it before a loss, or join now: callbacks may communicate.
        if any(collectives.gather_object(newest > known and before is not None)):
            self.events.call("on_save", run, saver.newest)
        elif was_saving or newest < known:  # the last main process may have had a disk of its own
            run.requests.save = True


def _forget_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that failed: they would keep the process group alive."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        each.__cause__, each = None, each.__cause__ or each.__context__
    error.__context__ = None

"""Preparation of a training, between the call of `train` and the first step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.initial_weights import InitialWeights
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.user_states import check_storable
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.data.build import make_train_loader
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.loop.batch_size_finder import BatchSizeFinder
from trainer_kit.loop.evaluation_loop import EvaluationLoop
from trainer_kit.loop.lr_schedule import make_run_scheduler
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.loop.regrouping import Regrouping
from trainer_kit.loop.retrying_train_step import RetryingTrainStep
from trainer_kit.loop.train_step import TrainStep
from trainer_kit.loop.training_loop import TrainingLoop
from trainer_kit.optim import check_optimizer, make_optimizer
from trainer_kit.utils.lazy_parameters import check_shapes
from trainer_kit.utils.rate_scales import warn_of_rate_scales
from trainer_kit.utils.schedule_free import set_training

logger = logging.getLogger("trainer_kit")


def set_up_training(
    evaluation: EvaluationLoop,
    reading: LoaderConfig,
    checkpoints: CheckpointManager,
    initial: InitialWeights,
    optimizer: torch.optim.Optimizer | None,
    lr_scheduler: Any,
    resume: bool | str | Path | None,
) -> TrainingLoop:
    """Make the optimizer, the loader and the schedule of a run, and restore the requested checkpoint.

    Args:
        evaluation: The evaluation loop of the run, whose strategy, model and loss are prepared.
        reading: How the training samples are read.
        checkpoints: The checkpoint manager of the training.
        initial: The weights to begin with, which are loaded already unless they are late.
        optimizer: The user's own optimizer; None: as the arguments say.
        lr_scheduler: The user's own scheduler, or a function that makes it; None: as the arguments say.
        resume: The checkpoint to resume from, see `Trainer.train`.

    Returns:
        The training loop, ready to begin.

    Raises:
        TypeError: If the optimizer or the scheduler is of the wrong type.
        ValueError: If the user's optimizer or scheduler does not fit, or if a lazy module has no shapes yet.
    """
    run, args, events, loss = evaluation.run, evaluation.run.args, evaluation.events, evaluation.probe.loss
    check_shapes(run.model)
    if (options := args.checkpointing_options) is not None:
        run.strategy.enable_activation_checkpointing(run.model, options)
    if args.torch_compile is not False:
        run.strategy.compile(run.model, CompileOptions.read(args.torch_compile))
    run.model.train()
    run.model.zero_grad()  # gradients may be left from an interrupted training or from the user's code
    run.optimizer = run.strategy.prepare_optimizer(optimizer or make_optimizer(run.model, args))
    check_optimizer(run.optimizer, run.model)
    warn_of_rate_scales(run.optimizer)
    checkpoints.lock_folder()
    checkpoints.find(run.strategy.collectives.broadcast(resume))
    initial.load_late(checkpoints.source)
    loader = make_train_loader(run, reading, saved=checkpoints.earlier_plan)
    finder = BatchSizeFinder(run, loader) if args.auto_find_batch_size else None
    if finder is not None:
        finder.begin(loss.compute_loss, optimizer)
    checkpoints.lay_out(loader)
    run.lr_scheduler = make_run_scheduler(run, checkpoints.plan, lr_scheduler)
    check_storable(run)
    checkpoints.carried.begin(loss.compute_loss, events.callbacks)
    checkpoints.restore()
    initial.complete()
    set_training(run.optimizer, True)
    loss.shifts = checkpoints.shifts_labels
    if (last := run.total_steps) <= run.state.step:
        logger.warning("nothing is left to do: step %d is reached, training ends at %d", run.state.step, last)
    sync = RankSync(run)
    parts = run, events, evaluation.probe, loader, checkpoints, sync
    step = TrainStep(*parts) if finder is None else RetryingTrainStep(*parts, finder)
    regrouping = Regrouping(checkpoints, reading, loader, loss, lr_scheduler is not None)
    return TrainingLoop(evaluation, loader, step, checkpoints, sync, regrouping)

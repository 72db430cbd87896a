"""Facts about a model before training: tied and frozen parameters, and those that its loss depends on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer_kit.loss.batch import Counts
from trainer_kit.loss.loss import ComputeLoss, Loss
from trainer_kit.loss.probe import LossProbe
from trainer_kit.loss.replay import ReplayBatch, replay
from trainer_kit.memory.fakes import Fakes
from trainer_kit.memory.substitutes import Substitutes
from trainer_kit.planning.dry_strategy import Stage
from trainer_kit.planning.sections import Model
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.tied_parameters import names_by_parameter
from trainer_kit.utils.units import join_names

_CHEAP = 20_000_000
"""Largest number of parameters for a trial with real values."""


class Trial(NamedTuple):
    """Result of one forward and backward pass of a copy of a model.

    Attributes:
        without_gradient: Names of trainable parameters without a gradient; None if the pass did not complete.
        error: Error of the pass; None if there was none.
        is_real: Whether the pass used real values; some models cannot run on shapes alone.
    """

    without_gradient: tuple[str, ...] | None
    error: Exception | None
    is_real: bool


def try_step(run: Run, batch: Any, compute_loss: ComputeLoss | None) -> Trial:
    """Run forward and backward on a copy of the model: on shapes alone, or with values if that fails and is cheap.

    Args:
        run: Run whose model stays unchanged.
        batch: Micro-batch on the host.
        compute_loss: The user's loss function; None for the model's own loss.
    """
    fakes, strategy = Fakes(), run.strategy
    try:
        model = fakes.copy(run.model)
        if (options := run.args.checkpointing_options) is not None:
            strategy.enable_activation_checkpointing(model, options)
        loss, shapes = (
            Loss.by_arguments(model, model, compute_loss, run.args),
            fakes.batch(batch),
        )
        copies = Substitutes(compute_loss, run.model, partial(fakes.copy, keeps_known=True))
        with copies.in_place(), fakes.computing():
            missed = _without_gradient(loss, shapes, Stage(strategy, None, torch.device("cpu")))
            return Trial(missed, None, is_real=False)
    except Exception as error:  # the model is the user's own
        if size_of(run.model) > _CHEAP:
            return Trial(None, error, is_real=False)
    try:
        model = copy.deepcopy(run.model)
        if (options := run.args.checkpointing_options) is not None:
            strategy.enable_activation_checkpointing(model, options)
        loss, batch = (
            Loss.by_arguments(model, model, compute_loss, run.args),
            strategy.to_device(batch),
        )
        with Substitutes(compute_loss, run.model, copy.deepcopy).in_place():
            LossProbe(loss, strategy).detect_label_shift(batch)  # reports errors in the batch's columns
            return Trial(_without_gradient(loss, batch, strategy), None, is_real=True)
    except Exception as error:
        return Trial(None, error, is_real=True)


def _without_gradient(loss: Loss, batch: Any, strategy: Strategy) -> tuple[str, ...]:
    model = loss.module
    model.train()
    model.zero_grad()
    for share in replay(loss, [ReplayBatch(batch, Counts(1, 0, 1, 1))], strategy):
        share.backward()
    return tuple(name for name, each in model.named_parameters() if each.requires_grad and each.grad is None)


def size_of(model: nn.Module) -> int:
    """Return the number of elements of all parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_facts(model: nn.Module, trial: Trial | None) -> Model:
    """Return the plan's section on the model.

    Args:
        model: The model.
        trial: Trial of a step; None if there was none.
    """
    return Model(
        name=type(model).__name__,
        parameters=size_of(model),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        tied=tied(model),
        without_gradient=trial.without_gradient if trial is not None else None,
    )


def tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that share one parameter."""
    return tuple(tuple(names) for names in names_by_parameter(model).values() if len(names) > 1)


def weights_dtype(model: nn.Module) -> str:
    """Return the dtypes of the trained weights as text."""
    kinds = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.requires_grad}
    return ", ".join(sorted(kinds)) or "none that is trained"


def model_warnings(run_args: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield warnings about the weights, independent of the data."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if torch.float16 in kinds and run_args.mixed_precision == "fp16":
        yield ("the weights are float16, whose gradients mixed_precision='fp16' cannot unscale: load them in float32")
    elif kinds & {torch.float16, torch.bfloat16}:
        kind = str(next(iter(kinds & {torch.float16, torch.bfloat16}))).removeprefix("torch.")
        yield (
            f"the weights are kept in {kind}, in which small updates are rounded away; load them in float32 and set "
            "mixed_precision"
        )
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, each in model.named_parameters() if each.requires_grad and each not in trained]
    if missing and trained:
        yield f"the optimizer does not have {join_names(missing)}: they require a gradient, and are never updated"

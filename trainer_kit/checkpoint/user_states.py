"""The states of the user's model, optimizer and own objects: whether a checkpoint can hold them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from trainer_kit.checkpoint.format.model_values import split_values
from trainer_kit.checkpoint.format.safetensors_writer import refuse_unstorable
from trainer_kit.checkpoint.stateful_entries import check_stateful
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.run import Run
from trainer_kit.utils.optimizer_state import check_optimizer_state
from trainer_kit.utils.parameter_order import add_model_names
from trainer_kit.utils.pytree import flatten_state


def check_storable(run: Run) -> None:
    """Check before the first step that a checkpoint can hold the model, the schedule and `run.stateful`.

    Raises:
        TypeError: If a tensor is sparse, quantized or of an unsupported dtype, another value in the model's
            `state_dict` cannot be kept, `state_dict` does not take the arguments of torch's, or the schedule lacks
            `state_dict` or `load_state_dict`.
        ValueError: If a tensor has no content (device "meta").
    """
    check_stateful(run)
    if run.args.save_strategy == "no":
        return
    for method in ("state_dict", "load_state_dict"):
        if not hasattr(run.lr_scheduler, method):
            raise TypeError(
                f"lr_scheduler={type(run.lr_scheduler).__name__} has no {method}(), so that no run could be resumed; "
                "give a schedule of torch, such as LambdaLR, or set save_strategy='no'"
            )
    try:
        state = run.model.state_dict(keep_vars=True)  # the call of a resume
    except TypeError as error:
        raise TypeError(
            f"the model cannot be saved: {error}; let its state_dict take *args and **kwargs and pass them on to "
            "torch's, or set save_strategy='no'"
        ) from error
    tensors, values = split_values(state)
    try:
        _, in_values = flatten_state(values)
        for name, tensor in (*tensors.items(), *in_values.items()):
            refuse_unstorable(name, tensor)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the model cannot be saved: {error}, or set save_strategy='no'") from None


def check_optimizer_storable(optimizer: torch.optim.Optimizer, args: TrainingArguments) -> None:
    """Check that a checkpoint can hold the optimizer's present state, if the arguments ask for checkpoints.

    Raises:
        TypeError: If the state holds a value that a checkpoint cannot hold.
        ValueError: If the state cannot be saved and loaded.
    """
    if args.save_strategy == "no":
        return
    try:
        check_optimizer_state(optimizer)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, or set save_strategy='no'") from error


def taken_optimizer_state(run: Run) -> Callable[[], dict[str, Any]]:
    """Read the optimizer's state on all processes; return a function that returns it, or raises its error."""
    assert run.optimizer is not None
    taken: Future[dict[str, Any]] = Future()
    try:
        state = run.strategy.optimizer_state(run.optimizer)
        add_model_names(state, run.optimizer, run.strategy.parameter_names(run.model))
        taken.set_result(state)
    except Exception as error:
        taken.set_exception(error)
    return taken.result

"""The states of the user's model, optimizer and own objects: whether a checkpoint can hold them; their restoration."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint import read_state
from trainer_kit.checkpoint.format.base_reference import STATE_NAME as BASE_STATE
from trainer_kit.checkpoint.format.model_values import split_values, values_name
from trainer_kit.checkpoint.format.safetensors_writer import refuse_unstorable
from trainer_kit.checkpoint.format.trainer_state import CARRIED_STATE
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.run import Run
from trainer_kit.utils.optimizer_state import check_optimizer_state
from trainer_kit.utils.parameter_order import add_model_names
from trainer_kit.utils.pytree import flatten_state
from trainer_kit.utils.user_warnings import warn

OWN_STATES = (
    "trainer", "optimizer", "lr_scheduler", "precision", "callbacks", "data", "ledger", "log_means",
    values_name(), CARRIED_STATE, BASE_STATE,
)  # fmt: skip
"""State names that `run.stateful` may not use."""


def check_stateful(run: Run) -> None:
    """Check that the entries of `run.stateful` can be saved.

    Raises:
        TypeError: If an entry lacks `state_dict` or `load_state_dict`.
        ValueError: If an entry has a name that the run uses itself.
    """
    for name, entry in run.stateful.items():
        if name in OWN_STATES:
            raise ValueError(f"run.stateful[{name!r}] uses a name of the run itself; choose another than {OWN_STATES}")
        if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
            raise TypeError(f"run.stateful[{name!r}] is a {type(entry).__name__} without state_dict or load_state_dict")


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


def restore_stateful(run: Run, directory: Path) -> None:
    """Restore the entries of `run.stateful`; warn about one that the checkpoint does not hold.

    Raises:
        ValueError: If an entry does not take its state.
    """
    for name, entry in run.stateful.items():
        state = read_state(directory, name)
        if state is None:
            warn(f"{directory} holds nothing for run.stateful[{name!r}]; it stays as it is")
            continue
        try:
            entry.load_state_dict(state)
        except Exception as error:
            raise ValueError(
                f"run.stateful[{name!r}] does not take the state that {directory} holds for it: "
                f"{type(error).__name__}: {error}; resume with the same object, or from another checkpoint"
            ) from error

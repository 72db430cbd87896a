"""Weights that a training begins with, from a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.run import Run
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class, without_wrappers


def load_initial_weights(run: Run, directory: Path | None, model_init: Callable[[], torch.nn.Module] | None) -> None:
    """Load weights into the prepared model of a run, and give values to all tensors that have none. Collective.

    Each process reads its own part. Tensors that the folder lacks, such as a new head, stay as `model_init` made them,
    with a warning that names them; tensors that the model lacks are ignored.

    Args:
        run: The run; its strategy and model are prepared.
        directory: A checkpoint, or a folder that `save_model` or `save_pretrained` wrote; None: nothing is loaded.
        model_init: Makes the model, with the same values on each call; None if there is no such function.

    Raises:
        CheckpointError: If files are missing or damaged.
        ValueError: If a tensor has another shape there, the folder holds none of the model's tensors, or a tensor has
            no value.
    """
    strategy, loaded = run.strategy, set[str]()
    if directory is not None:
        names = without_wrappers(run.model).state_dict().keys()
        missing = load_weights(
            run.model,
            strategy.session.fetch_checkpoint(directory),
            strict=False,
            is_verified=False,
            load_state=strategy.load_model_state,
            placement=strategy.sharding.placement,
            whole_tensors=strategy.sharding.whole_tensors,
        )
        strategy.session.release_checkpoint_copies()
        loaded = names - {*missing}
        lacks = f"weights={str(directory)!r} lacks {join_names(map(repr, missing))}"
        if not loaded:
            raise ValueError(
                f"{lacks}, all that this {model_class(run.model).__name__} has; give the folder of the same model"
            )
        if missing and strategy.is_main:
            warn(f"{lacks}: they begin as the model was made")
    strategy.complete_model(run.model, loaded, model_init)

"""Weights that a training begins with, from a folder."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path

import torch

from trainer_kit.checkpoint.format.base_reference import BaseReference
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.run import Run
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class, without_wrappers


class InitialWeights:
    """The values with which the model of a run begins, and those that no checkpoint holds.

    Args:
        run: The run.
        directory: A checkpoint, or a folder that `save_model` or `save_pretrained` wrote; None: nothing is loaded.
        model_init: Makes the model, with the same values on each call; None if there is no such function.

    Attributes:
        is_late: Whether the model may have no values before `load`, so that a resume does without: the main process
            would make the whole model for values that the checkpoint replaces.
    """

    def __init__(self, run: Run, directory: Path | None, model_init: Callable[[], torch.nn.Module] | None) -> None:
        self._run, self._directory, self._model_init = run, directory, model_init
        self.is_late = model_init is not None and run.strategy.sharding.is_active

    def load(self) -> None:
        """Load the folder into the prepared model, and give values to all tensors that have none. Collective.

        Each process reads its own part. Tensors that the folder lacks, such as a new head, stay as `model_init` made
        them, with a warning that names them; tensors that the model lacks are ignored. Later calls do nothing.

        Raises:
            CheckpointError: If files are missing or damaged.
            ValueError: If a tensor has another shape there, the folder holds none of the model's tensors, or a tensor
                has no value.
        """
        directory, self._directory = self._directory, None
        loaded = set[str]() if directory is None else self._load(directory)
        self._run.strategy.complete_model(self._run.model, loaded, self._model_init)

    def load_late(self, checkpoint: Path | None) -> None:
        """Load what is late, unless a checkpoint follows that holds all weights. Collective.

        Args:
            checkpoint: The checkpoint that a training resumes from; None for a new training.
        """
        if self.is_late and (checkpoint is None or BaseReference.read(checkpoint) is not None):
            self.load()

    def complete(self) -> None:
        """Give values to all tensors that have none after a checkpoint is loaded. Collective.

        Raises:
            ValueError: If a tensor has no value.
        """
        self._directory = None
        names = without_wrappers(self._run.model).state_dict().keys()
        self._run.strategy.complete_model(self._run.model, names, self._model_init)

    def _load(self, directory: Path) -> set[str]:
        """Return the names of the tensors that the folder holds."""
        run, strategy = self._run, self._run.strategy
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
        loaded = {*names} - {*missing}
        lacks = f"weights={str(directory)!r} lacks {join_names(map(repr, missing))}"
        if not loaded:
            raise ValueError(
                f"{lacks}, all that this {model_class(run.model).__name__} has; give the folder of the same model"
            )
        if missing and strategy.is_main:
            warn(f"{lacks}: they begin as the model was made")
        return loaded


def checked_folder(weights: str | Path | None, is_main: bool) -> Path | None:
    """Return the folder of initial weights; the main process checks it, since other machines may not see it.

    Raises:
        ValueError: If it is no folder.
    """
    if weights is None:
        return None
    if is_main and not Path(weights).is_dir():
        raise ValueError(f"weights={str(weights)!r} is no folder; give one that save_model() or a checkpoint wrote")
    return Path(weights)


def seeded(model_init: Callable[[], torch.nn.Module], seed: int) -> Callable[[], torch.nn.Module]:
    """Return a function that seeds torch before it calls `model_init`.

    Raises:
        TypeError: If `model_init` needs arguments.
    """
    with contextlib.suppress(ValueError):  # it has no signature
        needed = inspect.signature(model_init, follow_wrapped=False).parameters.values()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if missing := [each.name for each in needed if each.default is each.empty and each.kind not in kinds]:
            raise TypeError(
                f"model_init needs the argument {missing[0]!r}, but is called without any; let it read what it "
                "needs from where it is defined, as in lambda: make_model(trial)"
            )

    def make() -> torch.nn.Module:
        torch.manual_seed(seed)
        return model_init()

    return make

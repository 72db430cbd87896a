"""`StatefulEntries`: the objects in `run.stateful` across a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.format.base_reference import STATE_NAME as BASE_STATE
from trainer_kit.checkpoint.format.discovery import read_state, state_names
from trainer_kit.checkpoint.format.model_values import values_name
from trainer_kit.checkpoint.format.trainer_state import CARRIED_STATE
from trainer_kit.run import Run
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn

OWN_STATES = (
    "trainer", "optimizer", "lr_scheduler", "precision", "callbacks", "data", "ledger", "log_means",
    values_name(), CARRIED_STATE, BASE_STATE,
)  # fmt: skip
"""State names that `run.stateful` may not use."""


class StatefulEntries:
    """Restore the entries of `run.stateful`, also those that `on_train_begin` adds.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_begun = False
        self._directory: Path | None = None
        self._waiting: dict[str, Any] = {}  # states without an entry yet

    def restore(self, directory: Path) -> None:
        """Restore the entries from a checkpoint; warn about one that it does not hold.

        Raises:
            ValueError: If an entry does not take its state.
        """
        own = self._run.stateful
        names = state_names(directory) - {*OWN_STATES}
        for name in own.keys() - names:
            warn(f"{directory} holds nothing for run.stateful[{name!r}]; it stays as it is")
        self._directory = directory
        self._waiting = {name: read_state(directory, name) for name in names if name in own or not self._has_begun}
        self._restore_present()

    def begin(self) -> None:
        """Restore entries that `on_train_begin` has added; warn about states that remain without one.

        Raises:
            TypeError, ValueError: If an entry cannot be saved, or does not take its state.
        """
        check_stateful(self._run)
        self._has_begun = True
        self._restore_present()
        if self._waiting:
            warn(
                f"run.stateful has no {join_names([*map(repr, self._waiting)])}, for which {self._directory} holds a "
                "state, so that this start goes on without it; add the object before train(), or in on_train_begin"
            )
        self._waiting = {}

    def _restore_present(self) -> None:
        for name, entry in self._run.stateful.items():
            if name not in self._waiting:
                continue
            try:
                entry.load_state_dict(self._waiting.pop(name))
            except Exception as error:
                raise ValueError(
                    f"run.stateful[{name!r}] does not take the state that {self._directory} holds for it: "
                    f"{type(error).__name__}: {error}; resume with the same object, or from another checkpoint"
                ) from error


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

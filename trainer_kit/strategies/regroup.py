"""`Regroupable`: what a strategy offers whose processes stay when others are lost or join."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from trainer_kit.config import environment
from trainer_kit.utils.new_place import NEW, ask_for_place


class Regroupable(Protocol):
    """A strategy each of whose processes has the whole state, so that those that stay can train on."""

    def facts(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Return what must be the same on all processes: tensors by name, and the optimizer's parameters in order.

        Args:
            model: The user's module, prepared.
            optimizer: The prepared optimizer.
        """

    def expect_regroup(self, is_expected: bool) -> None:
        """Choose whether a lost process raises immediately, without a search for the cause."""

    def keep_buffers(self) -> None:
        """Keep a copy of the model's persistent buffers, which the step changes, if a regroup is expected."""

    def restore_buffers(self) -> None:
        """Set the buffers to the copy of `keep_buffers`, unless the weights have changed since."""

    def leave_group(self) -> None:
        """Leave the other processes; collectives under way fail, here and there."""

    def join_group(self) -> None:
        """Join the processes of the place that the environment names now. Collective."""

    def share_model(self, model: torch.nn.Module, source: int) -> None:
        """Give all processes the parameters and persistent buffers of one of them. Collective.

        Args:
            model: The user's module.
            source: Rank of that process.
        """


def refuse_to_join() -> None:
    """In a process that will join others: let new processes take over, since the calls that follow need the others.

    Raises:
        SystemExit: With code 143, if the launcher has not ended this process first.
    """
    if environment.is_newcomer() and (folder := environment.regroup_folder()) is not None:
        ask_for_place(Path(folder), environment.place().local_rank, NEW, lambda: False)
        raise SystemExit(143)

"""`Regroupable`: what a strategy offers whose processes go on after a loss of others."""

from __future__ import annotations

from typing import Protocol

import torch


class Regroupable(Protocol):
    """A strategy each of whose processes has the whole state, so that those that are left can train on."""

    def expect_regroup(self, is_expected: bool) -> None:
        """Choose whether a lost process raises at once, without a search for the cause."""

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

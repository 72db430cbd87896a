"""`JointPasses`: forward passes outside of the Trainer's own, which begin once all processes are in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from trainer_kit.strategies.process_group import ProcessGroup


class JointPasses:
    """A check that no process makes a forward pass of a sharded model alone.

    Such a pass, in a callback on the main process say, would wait for the others' parts of the weights, or take what
    they send for something else. The Trainer's own passes are the same on all processes, so that they cost nothing
    here.

    Args:
        group: The processes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._is_expected = False

    def watch(self, module: torch.nn.Module) -> None:
        """Check the forward passes of a module."""

        def before(module: torch.nn.Module, inputs: Any) -> None:
            if not self._is_expected:
                self.meet()

        module.register_forward_pre_hook(before, prepend=True)

    def keep_from_compiler(self) -> None:
        """Let torch's compiler, which is in memory by now, leave the meetings as they are."""
        self.meet = torch.compiler.disable(self.meet)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Enclose passes that all processes make."""
        before, self._is_expected = self._is_expected, True
        try:
            yield
        finally:
            self._is_expected = before

    def meet(self) -> None:
        """Wait until all processes begin a pass, unless all are known to.

        Raises:
            LostProcessError: If another process has failed, or does not answer.
            ValueError: If the others wait for this process elsewhere, or have left the run.
        """
        if not self._is_expected:
            self._group.meet(
                "calls the model outside of the Trainer's own passes",
                "with FSDP a forward pass gathers weights from all processes, so call the model on all of them",
            )

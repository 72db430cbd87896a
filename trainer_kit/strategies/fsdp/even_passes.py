"""`EvenPasses`: as many forward passes without gradients on each process, where a pass is a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from trainer_kit.strategies.collectives import Collectives
from trainer_kit.utils.module_modes import evaluating
from trainer_kit.utils.pytree import move


class _Call(NamedTuple):
    """Input of a forward pass, of the watched module with this number."""

    module: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EvenPasses:
    """Count the forward passes of modules, and repeat passes on processes that have fewer than others.

    A forward pass of a sharded model gathers its weights from all processes, so one pass more on one process would wait
    forever. Before each pass in `evened`, all processes agree whether any has one left. A process without one repeats
    its last input and drops the output.

    Args:
        collectives: The collectives of the run.
        context: Returns the context of a forward pass.
    """

    def __init__(self, collectives: Collectives, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._collectives = collectives
        self._context = context
        self._modules: list[torch.nn.Module] = []
        self._last: _Call | None = None
        self._counts = False

    def watch(self, module: torch.nn.Module) -> None:
        """Count the forward passes of a module, which all processes watch in the same order."""
        number = len(self._modules)
        self._modules.append(module)

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._counts and not torch.is_grad_enabled():
                self._last = _Call(number, args, kwargs)
                self._agree(1)

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)

    def keep_from_compiler(self) -> None:
        """Let torch's compiler, which is in memory by now, leave what the processes agree on as it is."""
        self._agree = torch.compiler.disable(self._agree)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def evened(self) -> Iterator[None]:
        """Enclose forward passes without gradients. Collective at its start and end; not reentrant."""
        assert not self._counts, "evened() is not reentrant"
        self._counts = True
        try:
            yield
            while self._agree(0):
                with self.uncounted():
                    self._repeat()
        finally:
            self._counts, self._last = False, None

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Enclose passes that all processes make, within one that they have agreed on."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def _agree(self, passes: int) -> bool:
        """Return whether any process has another pass; share an input with processes that have had none."""
        left, without_input = self._collectives.all_reduce_ints([passes, self._last is None])
        if left and without_input:
            calls = self._collectives.gather_object(
                None if self._last is None else move(self._last, torch.device("cpu"))
            )
            self._last = self._last or next(call for call in calls if call is not None)
        return left > 0

    def _repeat(self) -> None:
        assert self._last is not None
        module = self._modules[self._last.module]
        device = next(module.parameters()).device
        args, kwargs = move(self._last.args, device), move(self._last.kwargs, device)
        with evaluating(module), torch.no_grad(), self._context():
            module(*args, **kwargs)

"""`FixedBuckets`: DistributedDataParallel with the same gradient buckets in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer_kit.utils.late_compiler import call_as_is, ddp_without_compiler


class FixedBuckets(DistributedDataParallel):
    """DistributedDataParallel with the same gradient buckets in every step.

    The place of a gradient in its bucket decides in which order three or more processes sum it, and so its last bits.
    torch divides the parameters into buckets again after the first backward pass, in the order in which their gradients
    became ready. In a resumed run that pass belongs to another step, so the run would have other bits.

    Here the buckets depend on the model alone. They hold the parameters in reverse order of registration. Gradients
    become ready in this order if the model uses its layers in the order of registration.

    Args:
        module: The user's module.
        **options: See DistributedDataParallel.

    Attributes:
        reduced: The parameters with a gradient, by the index that torch's errors name.
        method: A method of the module that a forward pass calls in its place; None: the module.
    """

    reduced: list[torch.nn.Parameter]
    method: Callable[..., Any] | None = None

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        with ddp_without_compiler():
            super().__init__(module, **options)
        # Without this call the second forward pass divides the parameters again, with it the first one.
        self.reducer._push_all_rebuilt_params()
        kept = module.state_dict().keys()  # others are caches, whose shapes may differ between processes
        self.parameters_to_ignore.update(name for name, _ in module.named_buffers() if name not in kept)
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return (self.method or super()._run_ddp_forward)(*inputs, **kwargs)

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        self.reduced, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if not self.find_unused_parameters:  # with it, torch divides them once, and reverses the buckets itself
            self.reduced, are_sparse = self.reduced[::-1], are_sparse[::-1]
        return self.reduced, are_sparse


@contextlib.contextmanager
def sending_buffers(modules: Sequence[FixedBuckets]) -> Iterator[None]:
    """Enter a context in which torch sends the buffers, at each forward pass and at the end of `Join`.

    Args:
        modules: Modules whose buffers a process that still has batches sends to the others.
    """
    for each in modules:
        each.broadcast_buffers = True
    try:
        yield
    finally:
        for each in modules:
            each.broadcast_buffers = False


call_as_is(getattr(DistributedDataParallel, "_inside_ddp_forward", None))

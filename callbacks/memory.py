"""`Memory`: how much memory the run takes, and what for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer_kit.callback import Callback
from trainer_kit.utils.pytree import tensors

if TYPE_CHECKING:
    from trainer_kit.run import Run

GIB = 2**30


class Memory(Callback):
    """Adds to every record, and to the last one, what this process takes, in GiB.

    - what the strategy tells of its device: `memory_gib` in use, `peak_memory_gib` since training began,
      `reserved_memory_gib` that torch's allocator holds, `device_memory_gib` in use on the whole card, by whomever, and
      `process_memory_gib` of it by this process (the last two from NVML, which needs the extra `gpu`);
    - `fragmentation`: the share of the reserved memory, 0 to 1, that no tensor uses: 1 - in use / reserved. It is high
      between steps, when activations are freed, too; what fragmentation costs is the rise of `reserved_memory_gib`
      above `peak_memory_gib`;
    - `host_memory_gib`: the process's resident set;
    - `anatomy/weights_gib` (parameters and buffers), `anatomy/gradients_gib` (when the optimizer steps),
      `anatomy/optimizer_gib` (its states), each memory counted once, however many tensors share it, and
      `anatomy/activations_gib`: what is left of the peak, so activations and temporary buffers, where torch's allocator
      tells the peak.

    Parts are measured after the first step, and again when parameters were frozen or unfrozen or the optimizer has more
    states. Nothing waits for the device.
    """

    def __init__(self) -> None:
        self._weights = self._states = self._gradients = 0  # bytes
        self._seen: tuple[int, int] | None = None  # parameters trained, states of the optimizer, when measured
        self._is_due = True  # to measure the gradients at the next step
        self._process = psutil.Process()

    def on_train_begin(self, run: Run) -> None:
        self._seen, self._is_due, self._process = None, True, psutil.Process()

    def on_pre_optimizer_step(self, run: Run) -> None:
        if self._is_due:
            self._is_due = False
            self._gradients = _nbytes(each.grad for each in run.model.parameters() if each.grad is not None)

    def metrics(self, run: Run) -> dict[str, Any]:
        # A device that reports none has a text in their place, which is no number of a record.
        figures = {
            name: value for name, value in run.strategy.device_info.memory().items() if not isinstance(value, str)
        }
        reserved = figures.get("reserved_memory_gib")
        if reserved:
            figures["fragmentation"] = 1 - figures["memory_gib"] / reserved
        figures["host_memory_gib"] = self._process.memory_info().rss / GIB
        parts = self._parts(run)
        if parts and reserved:
            parts["anatomy/activations_gib"] = max(0.0, figures["peak_memory_gib"] - sum(parts.values()))
        return figures | parts

    def summary(self, run: Run) -> dict[str, Any]:
        return self.metrics(run)

    def _parts(self, run: Run) -> dict[str, float]:
        if run.optimizer is None or not self._gradients:
            return {}
        states = run.optimizer.state
        seen = (sum(each.requires_grad for each in run.model.parameters()), len(states))
        if self._seen != seen:
            self._is_due = self._seen is not None
            self._seen = seen
            self._weights = _nbytes([*run.model.parameters(), *run.model.buffers()])
            self._states = _nbytes(tensors(dict(states)))
        return {
            "anatomy/weights_gib": self._weights / GIB,
            "anatomy/gradients_gib": self._gradients / GIB,
            "anatomy/optimizer_gib": self._states / GIB,
        }


def _nbytes(parts: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors take, memory that several share counted once."""
    sizes: dict[int, int] = {}
    for part in parts:
        for tensor in _inner(part):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which a tensor keeps its numbers."""
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]
    if is_traceable_wrapper_subclass(tensor):  # such as the states of 8-bit optimizers
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]

"""`Memory`: the memory of the run, in total and by component."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer_kit.callback import Callback
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.units import GIB

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")


class Memory(Callback):
    """Add the memory of this process to every record and to the metrics of the whole training.

    - `memory_gib` (GiB): Memory in use on the device; on a CPU, of the process.
    - `peak_memory_gib` (GiB): The most that was in use since training began.
    - `reserved_memory_gib` (GiB): Memory that torch's allocator holds.
    - `device_memory_gib` (GiB): Memory in use on the whole device by all processes, from NVML (extra `gpu`).
    - `process_memory_gib` (GiB): Memory in use on the device by this process, from NVML (extra `gpu`).
    - `fragmentation` (share, 0 to 1): Share of the reserved memory that no tensor uses. It is also high between steps,
      when activations are freed. The cost of fragmentation is `reserved_memory_gib` minus `peak_memory_gib`; if it is
      large at the end, a warning says how to start with expandable segments.
    - `host_memory_gib` (GiB): Resident set of the process.
    - `anatomy/weights_gib` (GiB): Parameters and buffers. Memory that several tensors share is counted once.
    - `anatomy/gradients_gib` (GiB): Gradients at the optimizer's step.
    - `anatomy/optimizer_gib` (GiB): States of the optimizer.
    - `anatomy/activations_gib` (GiB): Rest of the peak, so activations and temporary buffers, if torch's allocator
      reports the peak.

    Components are measured after the first step, and again after parameters are frozen or unfrozen or the optimizer has
    more states. No measurement waits for the device.
    """

    def __init__(self) -> None:
        self._weights = self._states = self._gradients = 0  # bytes
        self._seen: tuple[int, int] | None = None  # when measured: number of trained parameters, of optimizer states
        self._is_due = True
        self._process = psutil.Process()

    def on_train_begin(self, run: Run) -> None:
        self._seen, self._process = None, psutil.Process()
        self._wait(True)

    def on_pre_optimizer_step(self, run: Run) -> None:
        if self._is_due:
            self._wait(False)
            self._gradients = _nbytes(each.grad for each in run.model.parameters() if each.grad is not None)

    def metrics(self, run: Run) -> dict[str, Any]:
        # A device that cannot measure its memory reports a text, which is not a number for a record.
        figures = {
            name: value for name, value in run.strategy.device_info.memory().items() if not isinstance(value, str)
        }
        reserved = figures.get("reserved_memory_gib")
        if reserved:
            figures["fragmentation"] = 1 - figures["memory_gib"] / reserved
        known = figures.get("memory_gib") if run.strategy.device.type == "cpu" else None
        figures["host_memory_gib"] = self._process.memory_info().rss / GIB if known is None else known
        parts = self._parts(run)
        if parts and reserved:
            parts["anatomy/activations_gib"] = max(0.0, figures["peak_memory_gib"] - sum(parts.values()))
        return figures | parts

    def summary(self, run: Run) -> dict[str, Any]:
        hint = run.strategy.device_info.fragmentation_hint()
        if hint is not None and run.strategy.is_main:
            _logger.warning("%s", hint)
        return self.metrics(run)

    def _wait(self, is_due: bool) -> None:
        """Choose whether to measure the gradients at the next step."""
        self._is_due = is_due
        self._idle_hooks = () if is_due else ("on_pre_optimizer_step",)

    def _parts(self, run: Run) -> dict[str, float]:
        if run.optimizer is None or not self._gradients:
            return {}
        states = run.optimizer.state
        seen = (sum(each.requires_grad for each in run.model.parameters()), len(states))
        if self._seen != seen:
            self._wait(self._seen is not None)
            self._seen = seen
            self._weights = _nbytes([*run.model.parameters(), *run.model.buffers()])
            self._states = _nbytes(tensors(dict(states)))
        return {
            "anatomy/weights_gib": self._weights / GIB,
            "anatomy/gradients_gib": self._gradients / GIB,
            "anatomy/optimizer_gib": self._states / GIB,
        }


def _nbytes(parts: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; shared memory counts once."""
    sizes: dict[int, int] = {}
    for part in parts:
        for tensor in _inner(part):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that store a sparse or wrapped tensor."""
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]
    if is_traceable_wrapper_subclass(tensor):  # such as the states of 8-bit optimizers, or a DTensor with its mesh
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, torch.Tensor)]
    return [tensor]

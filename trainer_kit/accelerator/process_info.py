"""`ProcessInfo`: the part of an Accelerator that needs its strategy only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer_kit.accelerator.process_operations import ProcessOperations, foreign
from trainer_kit.accelerator.state import AcceleratorState, GradientState, PartialState, share
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin
from trainer_kit.accelerator.wrappers import AccumulationState
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import map_tensors
from trainer_kit.utils.user_warnings import warn


class ProcessInfo(ProcessOperations):
    """The part of an `Accelerator` that needs its strategy only.

    Args:
        strategy: Strategy that is set up.
        accumulation: Settings of gradient accumulation.
    """

    def __init__(self, strategy: Strategy, accumulation: GradientAccumulationPlugin | None = None) -> None:
        self.strategy = strategy
        self.flow = AccumulationState(strategy, accumulation or GradientAccumulationPlugin())
        self._triggered = False
        share(strategy, self.flow)

    def __getstate__(self) -> dict[str, Any]:
        left_out: dict[str, Any] = {"strategy": None, "trackers": [], "_lock": None}  # what only this process can hold
        return self.__dict__ | {name: value for name, value in left_out.items() if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, strategy=PartialState().strategy)

    @property
    def state(self) -> AcceleratorState:
        """Facts of the run, with the precision of this Accelerator."""
        return AcceleratorState.of(self.strategy)

    @property
    def gradient_state(self) -> GradientState:
        """Position of the loop within an optimizer step."""
        return GradientState(flow=self.flow)

    @property
    def debug(self) -> bool:  # type: ignore[override]
        """Whether collective operations compare shapes first; set it on `PartialState`."""
        return bool(PartialState().debug)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on all processes."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether any process has called `set_trigger` since the last check. Collective."""
        (count,) = self.strategy.collectives.all_reduce_ints([int(self._triggered)])
        self._triggered = False
        return count > 0

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the samples that were repeated to fill a loader's last batches.

        The loader is the innermost prepared one that is being iterated. A tree that holds other things than tensors is
        gathered as Python objects: lists, tuples and the rows of a numpy array are concatenated, anything else becomes
        one element per process.

        A scalar that is repeated to the size of a batch, as a mean loss, is cut to the samples of a shorter last batch.

        Args:
            input_data: One row (or element) per sample of this process's batch.
            use_gather_object: Whether to gather tensors as Python objects too.

        Returns:
            Tensors as from `gather`, or a list of Python objects.
        """
        if self.strategy.static_shapes:
            self.flow.dispatch()  # the graph so far is the same with and without repeats
        loaders = self.flow.loaders
        rows, real = (loaders[-1].rows, loaders[-1].real) if loaders else (0, 0)
        if not use_gather_object and foreign(input_data) is None:
            devices, full = self.strategy.devices, 0
            if loaders and loaders[-1].gave_last:
                full = (loaders[-1].total_batch_size or 0) // self.num_processes
            return self.gather(map_tensors(lambda each: _without_repeats(each, rows, real, devices, full), input_data))
        if isinstance(input_data, (list, tuple)) or (isinstance(input_data, np.ndarray) and input_data.ndim):
            own = list(input_data)
            own = own[:real] if len(own) == rows else own if real or not loaders else []
        else:
            own = [input_data] if real or not loaders else []
        return [each for part in self.strategy.collectives.gather_object(own) for each in part]


def _without_repeats(tensor: torch.Tensor, rows: int, real: int, devices: int, full: int) -> torch.Tensor:
    """Return the part of a batch's results that belongs to its first `real` rows.

    Args:
        tensor: The results.
        rows: Rows of the batch, with repeats.
        real: Rows without repeats.
        devices: Devices of this process.
        full: Rows that the batches before had, where this is a pass's last one; else 0.
    """
    if real == rows:
        is_repeated = 0 < rows < full and tensor.ndim > 0 and tensor.shape[0] == full
        return tensor[:real] if is_repeated else tensor
    tensor = tensor if tensor.ndim else tensor[None]
    length = tensor.shape[0]
    if real == 0 or length * devices % rows == 0:  # one or more rows per sample, or per sample of one device
        return tensor[: -(-length * real // rows)]
    if length > 1:  # a scalar stands for the batch; an error would hang the other processes
        warn(
            f"gather_for_metrics got {length} rows for a batch of {rows} samples, of which {rows - real} are repeats "
            "that it cannot tell; give it a row for each sample",
        )
    return tensor

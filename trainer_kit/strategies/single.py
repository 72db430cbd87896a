"""`SingleDevice`: one process on one device: the CPU, a CUDA GPU, or Apple's MPS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.cuda_info import CudaInfo
from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.mps_info import MpsInfo
from trainer_kit.strategies.precision import Precision
from trainer_kit.utils.pytree import map_tensors, tensors
from trainer_kit.utils.rng import seed_generators

T = TypeVar("T")
_KINDS: dict[str, type[DeviceInfo]] = {"cuda": CudaInfo, "mps": MpsInfo}


class SingleDevice(Strategy):
    """One process on one device of this machine.

    Args:
        device: Device such as "cpu" or "cuda:1"; None: CUDA if available, else MPS, else the CPU.
        precision: See `Strategy`.
    """

    def __init__(self, device: str | torch.device | None = None, precision: Precision | None = None) -> None:
        super().__init__(precision)
        self.device = torch.device(device) if device is not None else _best_device()
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_info = _KINDS.get(self.device.type, DeviceInfo)(self.device)

    def setup(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        super().setup()

    def seed(self, value: int) -> None:
        seed_generators(value)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(value)
        elif self.device.type == "mps":
            torch.mps.manual_seed(value)

    def prepare_loader(self, batches: Iterable[T]) -> Iterator[T]:
        if self.device.type == "cuda":
            return self._copied_ahead(batches)
        return super().prepare_loader(batches)

    def _copied_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Copy the next batch to the GPU on a side stream while the current one is in use.

        An error of the next batch is raised after the current one.
        """
        stream = torch.cuda.Stream(self.device)
        waiting: Any = None
        for item in _with_error(batches):
            if not isinstance(item, Exception):
                with torch.cuda.stream(stream):
                    item.batch = map_tensors(self._pinned_copy, item.batch)
            if waiting is not None:
                yield waiting
            if isinstance(item, Exception):
                raise item
            # Synchronized only now: work enqueued for the previous batch must not wait for this copy.
            _hand_over(item.batch, stream)
            waiting = item
        if waiting is not None:
            yield waiting

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _with_error(items: Iterable[T]) -> Iterator[T | Exception]:
    """Yield the items, and the error that ends them."""
    try:
        yield from items
    except Exception as error:
        yield error


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _hand_over(batch: Any, stream: torch.cuda.Stream) -> None:
    """Make the current stream wait for the copies of `stream`, and protect their memory from early reuse."""
    current = torch.cuda.current_stream(stream.device)
    current.wait_stream(stream)
    for tensor in tensors(batch):
        if tensor.device.type == "cuda":
            tensor.record_stream(current)

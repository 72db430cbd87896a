"""`SampledLoader`: the training batches of a map-style dataset in the order of a user's sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_kit.data.map_loader import LoaderConfig, MicroBatch, TrainLoader
from trainer_kit.data.sampler_order import SamplerOrder, batch_slots, batch_steps
from trainer_kit.data.sampling import BatchIndices, Layout, epoch_length, kept_layout, ranges, steps_between
from trainer_kit.utils.user_warnings import warn


class SampledLoader(TrainLoader):
    """The training batches of a map-style dataset in the order of a sampler or batch sampler.

    A batch sampler's batches are dealt to the processes in turn. The size of its largest batch in the first epoch
    stands for the batch size.

    Args:
        dataset: A dataset with `__len__` and `__getitem__`.
        layout: Batch size, accumulation and processes.
        reading: Collation, seed and workers.
        order: The sampler's orders.
        drop_last: Whether to drop an epoch's last batches if not every process has a full one; a batch sampler decides
            for itself.
        saved: The `RunLength` state of a checkpoint whose steps are kept, see `kept_layout`.

    Raises:
        ValueError: If an epoch has no batch.
    """

    def __init__(
        self,
        dataset: Any,
        layout: Layout,
        reading: LoaderConfig,
        order: SamplerOrder,
        drop_last: bool = False,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._order = order
        self._drop_last = drop_last
        self._warned = False
        first = order.draw(0)
        self._has_batches = first.ends is not None
        if first.ends is not None:
            sizes = [stop - start for start, stop in zip([0, *first.ends], first.ends, strict=False)]
            layout = layout._replace(batch_size=max(sizes), devices=1, has_own_batches=True)
        layout = kept_layout(layout, saved)
        super().__init__(dataset, layout, reading, drop_last and not self._has_batches, samples=len(first.indices))
        self.has_equal_epochs = order.promised(1) is not None

    def length_of(self, epoch: int) -> int:
        return self._cut(len(self._order.draw(epoch).indices))

    def _cut(self, samples: int) -> int:
        return epoch_length(samples, self.layout, self._drop_last and not self._has_batches)

    def steps_left(self, epoch: int, position: int) -> int:
        passed_over = ranges(self.passed_over, epoch)
        if self._has_batches and (position or passed_over):
            return batch_steps(self._order.draw(epoch), position, self.layout, passed_over)
        length = self._order.length(epoch)
        if self._has_batches:
            return -(-length // self.layout.batches)
        return steps_between(position, self._cut(length), self.layout, passed_over)

    def resume(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> dict[str, Any] | None:
        if data_state is not None:
            self._order.resume(epoch, data_state)
        return data_state

    def state_after(self, epoch: int, data_state: dict[str, Any] | None) -> dict[str, Any] | None:
        self._order.forget(epoch)
        return data_state

    def micro_batches(
        self, epoch: int, position: int, steps: int, data_state: dict[str, Any] | None = None
    ) -> Iterator[MicroBatch]:
        state: dict[str, Any] = {}
        for micro_batch in super().micro_batches(epoch, position, steps):
            window = micro_batch.global_batch
            if window.epoch != state.get("epoch"):
                drawn = self._order.draw(window.epoch)
                state = {"epoch": window.epoch, "order": drawn.fingerprint, "sampler": drawn.state}
            window.data_state, window.fingerprint = state, state["order"]
            yield micro_batch

    def order(self, epoch: int) -> torch.Tensor:
        drawn = self._order.draw(epoch)
        return drawn.indices[: self._cut(len(drawn.indices))]

    def slots_of(self, epoch: int, position: int) -> Iterator[BatchIndices]:
        promised = self._order.promised(epoch)
        drawn = self._order.draw(epoch)
        if promised not in (None, drawn.length) and not self._warned:
            self._warned = True
            warn(
                f"the {type(self._order.sampler).__name__} gives {drawn.length} "
                f"{'batches' if self._has_batches else 'indices'} in epoch {epoch} instead of {promised}: epochs and "
                "steps are miscounted; give it a __len__ that holds in each epoch, or set max_steps"
            )
        if drawn.ends is None:
            return drawn.numbered(super().slots_of(epoch, position))
        return drawn.numbered(batch_slots(drawn, epoch, position, self.layout, ranges(self.passed_over, epoch)))

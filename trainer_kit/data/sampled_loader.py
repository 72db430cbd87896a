"""`SampledLoader`: the training batches of a map-style dataset in the order of a user's sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer_kit.data.map_loader import LoaderConfig, MicroBatch, TrainLoader
from trainer_kit.data.sampler_order import EpochOrder, SamplerOrder, batch_slots, batch_steps
from trainer_kit.data.sampling import BatchIndices, Layout, epoch_length, ranges
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

    Raises:
        ValueError: If an epoch has no batch.
    """

    def __init__(
        self, dataset: Any, layout: Layout, reading: LoaderConfig, order: SamplerOrder, drop_last: bool = False
    ) -> None:
        self._order = order
        self._drop_last = drop_last
        self._states: dict[int, dict[str, Any]] = {}
        self._warned = False
        first = order.draw(0)
        self._has_batches = first.ends is not None
        if first.ends is not None:
            sizes = [stop - start for start, stop in zip([0, *first.ends], first.ends, strict=False)]
            layout = layout._replace(batch_size=max(sizes))
        super().__init__(dataset, layout, reading, drop_last and not self._has_batches, samples=len(first.indices))

    def length_of(self, epoch: int) -> int:
        return self._cut(len(self._order.draw(epoch).indices))

    def _cut(self, samples: int) -> int:
        return epoch_length(samples, self.layout, self._drop_last and not self._has_batches)

    def steps_left(self, epoch: int, position: int) -> int:
        if not self._has_batches:
            return super().steps_left(epoch, position)
        passed_over = ranges(self.passed_over, epoch)
        if position == 0 and not passed_over and (batches := _length(self._order.sampler)) is not None:
            return -(-batches // (self.layout.readers * self.layout.accumulation))
        return batch_steps(self._order.draw(epoch), position, self.layout, passed_over)

    def micro_batches(
        self, epoch: int, position: int, steps: int, data_state: dict[str, Any] | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next `steps` steps, see `TrainLoader.micro_batches`.

        A sampler that does not give the order of an earlier start again is warned about.
        """
        if data_state is not None:
            drawn = self._order.draw(epoch, data_state["sampler"])
            if drawn.fingerprint != data_state["order"] and self.layout.reader == 0:
                warn(
                    f"the {type(self._order.sampler).__name__} gives another order in epoch {epoch} than before: this "
                    "resume is not exact; make its order follow from set_epoch and a seed, or give it state_dict and "
                    "load_state_dict"
                )
        self._states.clear()
        for micro_batch in super().micro_batches(epoch, position, steps):
            window = micro_batch.global_batch
            if window.epoch != epoch:  # workers may have read ahead, over several epochs
                epoch = window.epoch
                self._states = {number: state for number, state in self._states.items() if number >= epoch}
            window.data_state = self._states[epoch]
            window.fingerprint = window.data_state["order"]
            yield micro_batch

    def order(self, epoch: int) -> torch.Tensor:
        drawn = self._order.draw(epoch)
        return drawn.indices[: self._cut(len(drawn.indices))]

    def slots_of(self, epoch: int, position: int) -> Iterator[BatchIndices]:
        drawn = self._order.draw(epoch)
        self._check_length(drawn)
        self._states[epoch] = {"order": drawn.fingerprint, "sampler": drawn.state}
        if drawn.ends is None:
            return drawn.numbered(super().slots_of(epoch, position))
        return drawn.numbered(batch_slots(drawn, epoch, position, self.layout, ranges(self.passed_over, epoch)))

    def _check_length(self, drawn: EpochOrder) -> None:
        sampler = self._order.sampler
        given = len(drawn.indices if drawn.ends is None else drawn.ends)
        if self._warned or (length := _length(sampler)) is None or length == given:
            return
        self._warned = True
        warn(
            f"the {type(sampler).__name__} has a length of {length}, but gave {given}: epochs and steps are miscounted"
        )


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, ValueError):  # it has none, or does not know it
        return None

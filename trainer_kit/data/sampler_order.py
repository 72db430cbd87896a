"""`SamplerOrder`: the order that a user's sampler gives each epoch, and the batches of a batch sampler."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, WeightedRandomSampler
from xxhash import xxh3_64_intdigest

from trainer_kit.data.sampling import STAND_IN, BatchIndices, Layout, evaluation_slots, mix, parts
from trainer_kit.data.source import begin_epoch, parts_of
from trainer_kit.state import is_stateful
from trainer_kit.utils.lengths import known_length
from trainer_kit.utils.rng import generators_kept, seed_generators
from trainer_kit.utils.user_warnings import warn

_SAMPLER = 3
"""Keeps the seeds of samplers apart from those of samples and collation."""

_SHARED = ("generator", "data_source", "dataset")
"""Attributes of a sampler that its copies share: generators are seeded before each draw."""


class EpochOrder(NamedTuple):
    """The order of one epoch.

    Attributes:
        indices: Dataset indices, shape [samples].
        ends: Position after each batch of a batch sampler, from 0; None for a sampler of indices.
        fingerprint: Digest of the order below 2**40, to compare it over processes and starts.
        state: The sampler's state before it gave the order; None if it has none.
        repeats: How often the order has each sample before, shape [samples]; None if it has none twice.
    """

    indices: torch.Tensor
    ends: list[int] | None
    fingerprint: int
    state: dict[str, Any] | None
    repeats: np.ndarray | None

    @property
    def length(self) -> int:
        """Number of indices, or of batches of a batch sampler."""
        return len(self.indices) if self.ends is None else len(self.ends)

    def numbered(self, slots: Iterable[BatchIndices]) -> Iterator[BatchIndices]:
        """Yield slots of this order with the repeats of their samples."""
        for slot in slots:
            stop = slot.start + len(slot.indices)
            yield slot if self.repeats is None else slot._replace(repeats=self.repeats[slot.start : stop].tolist())


class SamplerOrder:
    """The orders of a user's sampler, each drawn as a whole.

    Before an epoch the global generators are seeded from (seed, epoch), the sampler's `set_epoch` is called, and its
    own generator is seeded (see `begin_epoch`). So all processes draw the same order. The epochs are drawn one after
    another, each once, so that a sampler may also count them. A later start therefore draws those before its own again,
    unless the sampler has a state, or its order is known to depend on nothing else.

    Args:
        sampler: An iterable of dataset indices, or of lists of them, one for each batch.
        seed: The run's seed.
        in_batches: Whether it yields batches; None: if it yields lists or arrays of one dimension.
        warns: Whether this process warns of an epoch whose order differs from the one that it had.
    """

    def __init__(self, sampler: Any, seed: int, in_batches: bool | None = None, warns: bool = True) -> None:
        self._in_batches = in_batches
        self.sampler = sampler
        self.seed = seed
        self._warns = warns
        self._orders: dict[int, EpochOrder] = {}
        self._digests: dict[int, int] = {}
        self._lengths: dict[int, int] = {}  # of epochs drawn, and of those looked ahead to
        self._next = 0  # the epoch after those that the sampler has drawn
        self._ahead: tuple[Any, int] | None = None  # a copy that has drawn further epochs, and its next one

    def draw(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            TypeError: If the sampler yields something else than indices or lists of indices.
            ValueError: If the sampler yields nothing.
        """
        if epoch not in self._orders:
            for number in range(self._first(epoch, self._next), epoch + 1):
                order = self._drawn_from(self.sampler, number)
                self._lengths[number] = order.length
                if self._digests.setdefault(number, order.fingerprint) != order.fingerprint:
                    self._warn(number)
            self._next, self._orders[epoch] = epoch + 1, order
        return self._orders[epoch]

    def resume(self, epoch: int, data_state: Mapping[str, Any]) -> None:
        """Continue after an earlier start, and warn if the sampler gives another order than it gave there.

        Args:
            epoch: Number of the epoch to continue.
            data_state: What a checkpoint holds of the last epoch that was drawn: this one, or the one before.
        """
        drawn, digest = data_state.get("epoch", epoch), data_state["order"]  # earlier versions wrote no epoch
        if data_state["sampler"] is not None and is_stateful(self.sampler):
            if self.promised(drawn) is None:
                self.draw(drawn)  # the lengths of earlier epochs
            self.sampler.load_state_dict(copy.deepcopy(data_state["sampler"]))
            self._orders.clear()
            self._digests.clear()
            self._next, self._ahead = drawn, None
        if self._digests.setdefault(drawn, digest) != digest:
            self._warn(drawn)
        elif epoch not in self._orders:
            self.draw(drawn)

    def forget(self, epoch: int) -> None:
        """Release the orders up to an epoch that has ended."""
        self._orders = {number: order for number, order in self._orders.items() if number > epoch}

    def promised(self, epoch: int) -> int | None:
        """Return how many indices or batches an epoch should have; None if nothing says so."""
        if epoch in self._lengths:
            return self._lengths[epoch]
        length = known_length(self.sampler)
        return length if length == self._lengths.get(0) else None

    def length(self, epoch: int) -> int:
        """Return how many indices or batches an epoch has.

        The sampler's own length counts if it is that of the first epoch. Without one, a copy of the sampler draws all
        epochs up to this one. A sampler that cannot be copied is taken to give each epoch as many as the last.
        """
        if (length := self.promised(epoch)) is not None:
            return length
        ahead, following = self._ahead or (copied(self.sampler), self._next)
        if ahead is self.sampler:
            self._lengths[epoch] = self._lengths[max(self._lengths)]
            return self._lengths[epoch]
        for number in range(self._first(epoch, following), epoch + 1):
            self._lengths[number] = self._drawn_from(ahead, number).length
        self._ahead = ahead, epoch + 1
        return self._lengths[epoch]

    def _first(self, epoch: int, following: int) -> int:
        """Return the first epoch to draw on the way to another one, where `following` is next."""
        return min(following, epoch) if _counts_epochs(self.sampler) else epoch

    def _drawn_from(self, sampler: Any, epoch: int) -> EpochOrder:
        with generators_kept(torch.device("cpu")):
            seed_generators(mix(self.seed, epoch, _SAMPLER))
            begin_epoch(sampler, epoch)
            state = copy.deepcopy(sampler.state_dict()) if is_stateful(sampler) else None
            drawn = [*iter(sampler)]  # without asking for its length, which it may not know
        if not drawn:
            raise ValueError(
                f"the {type(sampler).__name__} gave nothing in epoch {epoch}; it must give indices each time"
            )
        in_batches = self._in_batches
        if in_batches is None:
            in_batches = isinstance(drawn[0], list) or getattr(drawn[0], "ndim", 0) == 1
        try:
            indices = np.asarray([*map(operator.index, itertools.chain.from_iterable(drawn) if in_batches else drawn)])
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the {type(sampler).__name__} gave {drawn[0]!r:.50}; it must give indices of train_dataset, or lists "
                "of indices"
            ) from error
        ends = [*itertools.accumulate(len(batch) for batch in drawn)] if in_batches else None
        fingerprint = xxh3_64_intdigest(indices.tobytes()) ^ xxh3_64_intdigest(repr(ends).encode())
        return EpochOrder(torch.from_numpy(indices), ends, fingerprint % 2**40, state, _repeats(indices))

    def _warn(self, epoch: int) -> None:
        if self._warns:
            self._warns = False
            warn(
                f"the {type(self.sampler).__name__} gives another order in epoch {epoch} than before: this resume is "
                "not exact; make its order follow from set_epoch and a seed, or give it state_dict and load_state_dict"
            )


def _counts_epochs(sampler: Any) -> bool:
    """Return whether a sampler's order may depend on how often it was drawn before."""
    if hasattr(sampler, "set_epoch"):
        return False
    is_known = type(sampler).__module__.startswith("torch.utils.data.")
    return not is_known or (isinstance(sampler, BatchSampler) and _counts_epochs(sampler.sampler))


def copied(sampler: Any) -> Any:
    """Return a copy of a sampler, which shares its dataset and generators; the sampler itself if it has no copy."""
    shared = [getattr(part, name, None) for part in parts_of(sampler) for name in _SHARED]
    try:
        return copy.deepcopy(sampler, {id(each): each for each in shared})
    except Exception:  # any error of the user's sampler
        return sampler


def _repeats(indices: np.ndarray) -> np.ndarray | None:
    """Return how often each index has come before; None if none comes twice."""
    places = np.argsort(indices, kind="stable")
    arranged, numbers = indices[places], np.arange(len(indices))
    begins = np.concatenate([[True], arranged[1:] != arranged[:-1]])
    if begins.all():
        return None
    found = np.empty_like(numbers)
    found[places] = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
    return found


def batch_slots(
    order: EpochOrder, epoch: int, position: int, layout: Layout, passed_over: Sequence[tuple[int, int]] = ()
) -> Iterator[BatchIndices]:
    """Yield the indices of this process's micro-batches of an epoch, where a batch sampler forms the batches.

    Args:
        order: The order of the epoch, with the ends of its batches.
        epoch: Number of the epoch, from 0.
        position: Position in the epoch to start at.
        layout: Accumulation and processes; a limit cuts larger batches.
        passed_over: Ranges (start, stop) of the epoch to skip.
    """
    windows = [*_windows(order, position, layout, passed_over)]
    for window in windows:
        pieces: list[tuple[int, int] | None] = []
        for first in range(0, len(window), layout.readers):
            row = window[first : first + layout.readers]
            own = layout.cut(*row[layout.reader]) if layout.reader < len(row) else []
            most = max(layout.parts(stop - start) for start, stop in row)
            pieces += [*own, *[None] * (most - len(own))]
        start, stop = window[0][0], window[-1][1]
        for number, piece in enumerate(pieces):
            begin, end = piece or (start, min(start + min(layout.at_once, STAND_IN), stop))
            yield BatchIndices(
                epoch=epoch,
                start=begin,
                indices=order.indices[begin:end].tolist(),
                is_dummy=piece is None,
                micro_batch_index=number,
                is_last=number == len(pieces) - 1,
                window_start=start,
                window_stop=stop,
                closes_epoch=window is windows[-1],
            )


def batch_steps(order: EpochOrder, position: int, layout: Layout, passed_over: Sequence[tuple[int, int]] = ()) -> int:
    """Return the optimizer steps from a position to the end of an epoch whose batches a batch sampler forms."""
    return sum(1 for _ in _windows(order, position, layout, passed_over))


def evaluation_plan(order: EpochOrder, layout: Layout) -> Iterator[BatchIndices]:
    """Yield this process's batches of an evaluation in a sampler's order; see `evaluation_slots`."""
    if order.ends is None:
        return order.numbered(evaluation_slots(len(order.indices), layout, order.indices))
    single = layout._replace(accumulation=1)
    return order.numbered(batch_slots(order, -1, 0, single))


def _windows(
    order: EpochOrder, position: int, layout: Layout, passed_over: Sequence[tuple[int, int]]
) -> Iterator[list[tuple[int, int]]]:
    """Yield (start, stop) of each batch of a step, step by step; a skipped range ends a step."""
    assert order.ends is not None
    batches = [batch for batch in itertools.pairwise([0, *order.ends]) if batch[0] < batch[1]]
    size = layout.batches
    for first, last in parts(position, order.ends[-1], passed_over):
        kept = [(max(start, first), min(stop, last)) for start, stop in batches if start < last and stop > first]
        for place in range(0, len(kept), size):
            yield kept[place : place + size]


def balanced_sampler(labels: Any, num_samples: int | None = None) -> WeightedRandomSampler:
    """Return a sampler that draws every class equally often, with replacement.

    Args:
        labels: The class of each sample: integers, shape [samples].
        num_samples: Samples of an epoch; None: as many as there are labels.

    Raises:
        ValueError: If there are no labels, or they have more than one dimension.
    """
    classes = np.asarray(labels)
    if classes.ndim != 1 or not len(classes):
        raise ValueError(f"labels of shape {list(classes.shape)} are no list of classes; give one for each sample")
    _, number, counts = np.unique(classes, return_inverse=True, return_counts=True)
    return WeightedRandomSampler((1.0 / counts[number]).tolist(), num_samples or len(classes))

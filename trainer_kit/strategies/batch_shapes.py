"""Shapes of the batches that a run feeds to its model; each new shape costs a compilation on a TPU."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_kit.utils.units import format_count, join_names

TRAINING, EVALUATION = "training", "evaluation"

_MOST = 1000
"""Most shapes kept, which bounds the memory if each batch has a shape of its own."""

_LISTED = 4
"""Most sizes that a sentence lists."""

_SHORTEST = 32
"""Smallest length that texts are padded to, in tokens."""


@dataclasses.dataclass(slots=True, eq=False)
class BatchShape:
    """Shapes of a batch's tensors, and the number of batches with them.

    Attributes:
        kind: "training" if gradients were enabled for the batch, else "evaluation"; see also `mark_evaluation`.
        columns: Shape and dtype by name; tensors in nested dicts and tuples have names such as "inputs.pixels" or "0".
        first: Number of the first such batch among all batches, from 1.
        count: Number of such batches.
        signature: Hashable key that distinguishes this shape from others.
    """

    kind: str
    columns: dict[str, tuple[tuple[int, ...], torch.dtype]]
    first: int
    count: int = 0
    signature: Any = dataclasses.field(default=None, repr=False)

    @property
    def elements(self) -> int:
        """Number of elements in all tensors, padding included."""
        return sum(math.prod(shape) for shape, _ in self.columns.values())


class ShapeLedger:
    """Count of each batch shape that was fed to the model.

    Args:
        padded: Whether the loaders pad batches, as those of a strategy with static shapes do.
        by_hand: Whether the batches come from the user's own loop, so that advice names a DataLoader's options.

    Attributes:
        batches: Number of batches recorded.
        newest: The most recently added shape; None before the first batch.
        latest: The shape of the last batch; None before the first batch.
        complete: Whether all shapes are kept; after 1,000 different ones, new shapes are not.
    """

    def __init__(self, padded: bool = False, by_hand: bool = False) -> None:
        self.padded = padded
        self.by_hand = by_hand
        self.batches = 0
        self.newest: BatchShape | None = None
        self.latest: BatchShape | None = None
        self.complete = True
        self._shapes: dict[tuple[bool, Any], BatchShape] = {}
        self._unused: BatchShape | None = None  # may have a count of 0

    def __len__(self) -> int:
        """Return the number of different shapes in training and evaluation."""
        return len(self._shapes) - (self._unused is not None and not self._unused.count)

    def record(self, batch: Any) -> None:
        """Count the shapes of a batch."""
        self.batches += 1
        self.latest = self._counted(torch.is_grad_enabled(), _signature(batch), batch)

    def mark_evaluation(self, shape: BatchShape) -> None:
        """Count one batch of this shape as evaluation, although gradients were enabled for it."""
        if shape.kind == EVALUATION:
            return
        shape.count -= 1
        if not shape.count and shape is not (before := self._unused):
            if before is not None and not before.count:
                self._shapes.pop((True, before.signature), None)
            self._unused = shape  # stays, as the newest one of these: it is likely to come again
        other = self._shapes.get((False, shape.signature))
        if other is None:
            other = self._keep(False, BatchShape(EVALUATION, shape.columns, shape.first, 0, shape.signature))
        other.count += 1

    def _counted(self, trains: bool, signature: Any, batch: Any) -> BatchShape:
        shape = self._shapes.get((trains, signature))
        if shape is None:
            columns = {name: (tuple(_shape(each)), each.dtype) for name, each in _named_tensors(batch)}
            kind = TRAINING if trains else EVALUATION
            shape = self.newest = self._keep(trains, BatchShape(kind, columns, self.batches, 0, signature))
        elif not shape.count:  # those before were for evaluation
            self.newest, shape.first = shape, self.batches
            self._shapes[trains, signature] = self._shapes.pop((trains, signature))
        shape.count += 1
        return shape

    def _keep(self, trains: bool, shape: BatchShape) -> BatchShape:
        if len(self) < _MOST:
            self._shapes[trains, shape.signature] = shape
        else:
            self.complete = False
        return shape

    def of(self, kind: str) -> list[BatchShape]:
        """Return the shapes of "training" or "evaluation", in order of first occurrence."""
        return [shape for shape in self._shapes.values() if shape.kind == kind and shape.count]

    @property
    def graphs(self) -> int:
        """Estimated number of graphs that a TPU would compile for the recorded shapes.

        Each shape takes one graph. The first training shape takes two, since step 1 creates the optimizer's state.
        Gradient accumulation, which is not known here, takes up to three for each training shape: for a step's first
        micro-batch, its middle ones and its last.
        """
        return _graphs(len(self.of(TRAINING)), len(self.of(EVALUATION)))

    def advice(self) -> str:
        """Return sentences on the number of graphs a TPU would compile, the varying shapes, and what to change."""
        if not self.batches:
            return "no batch has been seen yet; train or evaluate for a few steps first"
        training, evaluation = self.of(TRAINING), self.of(EVALUATION)
        sentences = [self._summary(len(training), len(evaluation))]
        for kind, shapes in ((TRAINING, training), (EVALUATION, evaluation)):
            if len(shapes) > 1:
                sentences.append(f"in {kind} {differences(shapes)}: {remedy(shapes, self.by_hand)}")
        if len(sentences) == 1:
            sentences.append("no shape varies, and nothing is to be changed")
        elif (
            not (self.padded or self.by_hand)
            and (left := _graphs(_padded_shapes(training), _padded_shapes(evaluation))) < self.graphs
        ):
            sentences.append(
                "under strategy='xla' the loaders do by themselves what leaves the results as they are: they fill up "
                "batches that are not full, and pad what a tokenizer pads to powers of two, unless pad_to_lengths or "
                f"pad_to_multiple_of is set; that would leave about {left}"
            )
        return ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences) + "."

    def against_usual(self, shape: BatchShape) -> tuple[str, str] | None:
        """Return a shape's difference from the most frequent one of its kind, and a remedy; None without another."""
        others = [each for each in self.of(shape.kind) if each is not shape]
        if not others:
            return None
        usual = max(others, key=lambda each: each.count)
        return _contrast(shape, usual), remedy([usual, shape], self.by_hand)

    def _summary(self, training: int, evaluation: int) -> str:
        known = "" if self.complete else "more than "
        twice = ", and the first of training twice" if training else ""
        return (
            f"batches came in {known}{format_count(training, 'shape')} in training and {evaluation} in evaluation, for "
            f"which, as they are, a TPU would compile {known or 'about '}{format_count(self.graphs, 'graph')} (one for "
            f"each{twice}; gradient accumulation adds to them)"
        )


def differences(shapes: list[BatchShape]) -> str:
    """Describe how shapes vary: "the number of rows of x and y varies (32 in 7 batches, 26 in 1)"."""
    parts = []
    for (dimension, _), (columns, sizes) in _varying(shapes).items():
        what = "the number of rows" if dimension == 0 else f"dimension {dimension}"
        parts.append(f"{what} of {join_names(columns)} varies ({_sizes(sizes)})")
    if changing := _changing(shapes):
        verb = "is" if len(changing) == 1 else "are"
        parts.append(f"{join_names(changing)} {verb} not of the same kind in all batches")
    return "; ".join(parts)


def remedy(shapes: list[BatchShape], by_hand: bool = False) -> str:
    """Return advice that reduces the number of `shapes`, all of one kind; `by_hand` as in `ShapeLedger`."""
    varying = _varying(shapes)
    parts = []
    if any(dimension == 0 for dimension, _ in varying):
        drop = "give the DataLoader drop_last=True" if by_hand else "set dataloader_drop_last=True"
        size = "batch_size" if by_hand else "per_device_eval_batch_size"
        if shapes[0].kind == TRAINING:
            parts.append(f"{drop}, which leaves out the batch that is not full")
        else:
            parts.append(f"take a {size} that divides the number of samples")
    lengths = {size for (dimension, _), (_, sizes) in varying.items() if dimension > 0 for size in sizes}
    if lengths:
        few = sorted({power_of_two(size) for size in lengths})[-_LISTED:]
        if lengths <= {*few}:  # they are padded so already
            few = few[-1:]
        parts.append(
            f"pad to few sizes in the DataLoader's collate_fn, with a tokenizer by pad_to_multiple_of={few[-1]}"
            if by_hand
            else f"pad to few sizes, with a tokenizer by pad_to_lengths={few} or pad_to_multiple_of={few[-1]}, else in "
            "the data_collator"
        )
    if _changing(shapes):
        parts.append("give all batches the same columns, with the same dtype and number of dimensions")
    return "; ".join(parts)


def _signature(tree: Any) -> Any:
    """Return a hashable key: the nesting, with each tensor's shape and dtype."""
    if isinstance(tree, torch.Tensor):
        return _shape(tree), tree.dtype
    is_mapping = type(tree) is dict or isinstance(tree, Mapping)
    if not is_mapping and not isinstance(tree, (list, tuple)):
        return None
    return tuple(
        [
            (name, _signature(each) if type(each) is not torch.Tensor or each.is_nested else (each.shape, each.dtype))
            for name, each in (tree.items() if is_mapping else enumerate(tree))
        ]
    )


def _shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a tensor, of a nested one that of all its values together: its own has no numbers."""
    return tensor.values().shape if tensor.is_nested else tensor.shape


def _named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name or "the batch", tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key))


def _graphs(training: int, evaluation: int) -> int:
    return training + (training > 0) + evaluation


def _padded_shapes(shapes: list[BatchShape]) -> int:
    """Count the shapes left if rows are padded to the largest number, and other varying sizes to powers of two."""
    sizes_of = {
        (name, dimension): sizes for (dimension, _), (columns, sizes) in _varying(shapes).items() for name in columns
    }

    def padded(name: str, dimension: int, size: int) -> int:
        sizes = sizes_of.get((name, dimension), {size: 1})
        return max(sizes) if dimension == 0 else size if len(sizes) == 1 else power_of_two(size)

    return len(
        {
            tuple(
                (name, dtype, tuple(padded(name, dimension, size) for dimension, size in enumerate(sizes)))
                for name, (sizes, dtype) in shape.columns.items()
            )
            for shape in shapes
        }
    )


def _varying(shapes: list[BatchShape]) -> dict[tuple[int, Any], tuple[list[str], Counter[int]]]:
    """Return the dimensions of varying size, with the columns that vary alike and the number of batches by size."""
    sizes_of: dict[tuple[int, int, str], Counter[int]] = {}  # columns compare only at the same rank
    for shape in shapes:
        for name, (sizes, _) in shape.columns.items():
            for dimension, size in enumerate(sizes):
                sizes_of.setdefault((dimension, len(sizes), name), Counter())[size] += shape.count
    groups: dict[tuple[int, Any], tuple[list[str], Counter[int]]] = {}
    for (dimension, _, name), counts in sorted(sizes_of.items(), key=lambda item: item[0][0]):
        if len(counts) > 1:
            groups.setdefault((dimension, frozenset(counts.items())), ([], counts))[0].append(name)
    return groups


def _changing(shapes: list[BatchShape]) -> list[str]:
    """Return the columns that some batches lack, or whose dtype or number of dimensions changes."""
    kinds: dict[str, Counter[Any]] = {}
    for shape in shapes:
        for name, (sizes, dtype) in shape.columns.items():
            kinds.setdefault(name, Counter())[len(sizes), dtype] += 1
    return [name for name, each in kinds.items() if len(each) > 1 or each.total() < len(shapes)]


def _contrast(shape: BatchShape, usual: BatchShape) -> str:
    """Describe the difference from the usual shape: "x is [26, 4] instead of [32, 4]"."""
    parts: dict[str, list[str]] = {}
    for name, (sizes, dtype) in shape.columns.items():
        if name not in usual.columns:
            parts.setdefault("here and mostly not", []).append(name)
            continue
        before, dtype_before = usual.columns[name]
        if sizes != before:
            parts.setdefault(f"{[*sizes]} instead of {[*before]}", []).append(name)
        if dtype != dtype_before:
            parts.setdefault(f"{dtype} instead of {dtype_before}", []).append(name)
    if missing := [name for name in usual.columns if name not in shape.columns]:
        parts["missing"] = missing
    return ", ".join(
        f"{join_names(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in parts.items()
    )


def _sizes(sizes: Counter[int]) -> str:
    """Describe a few sizes with their numbers of batches, the most frequent first, or many by their range."""
    if len(sizes) > _LISTED:
        return f"{len(sizes)} sizes from {min(sizes)} to {max(sizes)}"
    (first, count), *rest = sizes.most_common()
    return ", ".join([f"{first} in {format_count(count, 'batch')}", *(f"{size} in {times}" for size, times in rest)])


def power_of_two(size: int) -> int:
    """Return the length that loaders pad `size` to under static shapes: a power of two of at least 32."""
    return max(_SHORTEST, 1 << max(size - 1, 0).bit_length())

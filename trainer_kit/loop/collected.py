"""`Collected`: a dataset's predictions and labels, collected in host memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainer_kit.loop.prediction import EvalPrediction
from trainer_kit.loss.batch import IGNORED
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import map_tensors

_PARTS = ("predictions", "labels", "inputs", "losses")
_LISTED = ("labels", "inputs")
"""Parts that may be lists with an entry for each sample."""

_BF16 = np.dtype("V2")
"""Dtype of arrays that hold the bits of bfloat16, which numpy lacks."""


class Collected:
    """Outputs and labels of all batches, on the host.

    They are brought to the host, kept and gathered in their own dtype. Those in half precision become float32 at the
    end, on the host.

    Args:
        fill: Value that fills up predictions that differ in further dimensions than the first.
        joins: Whether the batches are joined; False: the prediction has lists with an entry for each batch.
        consume: Takes each batch but the last as soon as the next one is added, so that only the last is kept; None:
            all are kept.
    """

    def __init__(
        self, fill: int = IGNORED, joins: bool = True, consume: Callable[[EvalPrediction], None] | None = None
    ) -> None:
        self.blocks: list[tuple[Any, ...]] = []
        self._fill = fill
        self._joins = joins
        self._consume = consume
        self._prediction: EvalPrediction | None = None

    def add(
        self, predictions: Any, labels: Any, inputs: Any = None, losses: Any = None, samples: int | None = None
    ) -> None:
        """Add a batch; waits for the device.

        Args:
            predictions: See `EvalPrediction`, as for the next three.
            labels: The labels; a list with an entry for each sample becomes such a list of the whole dataset.
            inputs: The inputs, like the labels.
            losses: The losses.
            samples: Samples of the batch; None: a list or tuple holds columns.
        """
        if self._consume is not None and self.blocks:  # while the device works on this batch
            self._consume(_handed_out(self.blocks.pop()))
        parts = (map_tensors(_to_array, part) for part in (predictions, labels, inputs, losses))
        self.blocks.append((*parts, samples))

    def gather(self, strategy: Strategy, everywhere: bool) -> None:
        """Bring all batches to all processes, or to the main one; the others then have none."""
        collectives = strategy.collectives
        shares = collectives.gather_object(self.blocks) if everywhere else collectives.gather_to_main(self.blocks)
        shares, self.blocks = collectives.once_a_reader(shares), []
        self.blocks = [
            block for row in itertools.zip_longest(*shares) for block in row if block is not None
        ]  # dealt out in turn

    @property
    def has_labels(self) -> bool:
        """Whether a gathered batch has labels."""
        return any(labels is not None for _, labels, *_ in self.blocks)

    def batches(self) -> Iterator[EvalPrediction]:
        """Yield the gathered batches in the dataset's order; not after `prediction`."""
        return map(_handed_out, self.blocks)

    def prediction(self) -> EvalPrediction:
        """Return the gathered batches as one, in the dataset's order; the same each time."""
        if self._prediction is None:
            blocks, self.blocks = self.blocks, []
            self._prediction = _joined_blocks(blocks, self._fill) if self._joins else _listed(blocks)
        return self._prediction


def _listed(blocks: list[tuple[Any, ...]]) -> EvalPrediction:
    """Return lists with an entry for each batch; a part that no batch has is None."""
    batches = [*map(_handed_out, blocks)]
    parts = ([getattr(batch, field.name) for batch in batches] for field in dataclasses.fields(EvalPrediction))
    return EvalPrediction(*(None if all(entry is None for entry in part) else part for part in parts))


def _joined_blocks(blocks: list[tuple[Any, ...]], fill: int) -> EvalPrediction:
    """Join the batches. Empties the list."""
    if not blocks:
        return EvalPrediction(None, None)
    *columns, sizes = (list(column) for column in zip(*blocks, strict=True))
    blocks.clear()
    fills = (fill, IGNORED, IGNORED, IGNORED)
    return EvalPrediction(*map(_joined_present, _PARTS, columns, itertools.repeat(sizes), fills))


def _handed_out(block: tuple[Any, ...]) -> EvalPrediction:
    """Return a batch in arrays of its own, which its receiver may change: on the CPU, those of a block are the data."""
    *parts, _ = block
    return EvalPrediction(*(map_tensors(_own, part, np.ndarray) for part in parts))


def _own(array: np.ndarray) -> np.ndarray:
    return array.copy() if (wide := _wide(array)) is array else wide


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    host = tensor.detach().cpu()
    if host.nbytes < host.untyped_storage().nbytes():
        host = host.clone()  # a view would keep all of its tensor in memory
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(_BF16)
    return host.numpy()


def _wide(array: np.ndarray) -> np.ndarray:
    """Convert half precision to float32."""
    if array.dtype == _BF16:
        bits = array.view(np.uint16).astype(np.uint32)
        bits <<= 16  # a bfloat16 is the upper half of a float32
        return bits.view(np.float32)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _joined_present(name: str, parts: list[Any], sizes: list[int | None], fill: int) -> Any:
    """Join the batches that have this part; return None without one. Empties the list."""
    sizes = [size for part, size in zip(parts, sizes, strict=True) if part is not None]
    parts[:] = [part for part in parts if part is not None]
    if not parts:
        return None
    if name in _LISTED:
        return _joined_lists(name, parts, sizes, fill)
    return _chained(parts) if _is_per_sample(parts, sizes, False) else _joined(name, parts, fill)


def _joined_lists(name: str, parts: list[Any], sizes: list[int | None], fill: int) -> Any:
    """Join what may be, or hold in a tuple or a mapping, lists with an entry for each sample. Empties the list."""
    if _is_per_sample(parts, sizes, True):
        return _chained(parts)
    if not isinstance(parts[0], (tuple, Mapping)):
        return _joined(name, parts, fill)
    _check_kinds(name, parts)
    return _by_entry(parts, lambda entries: _joined_lists(name, entries, sizes, fill))


def _by_entry(parts: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Join sequences or mappings of one structure by entry, to a tuple or a dict. Empties the list."""
    is_mapping = isinstance(parts[0], Mapping)
    entries = {key: [part[key] for part in parts] for key in (parts[0] if is_mapping else range(len(parts[0])))}
    parts.clear()
    joined = {key: join(column) for key, column in entries.items()}
    return joined if is_mapping else tuple(joined.values())


def _is_per_sample(parts: list[Any], sizes: list[int | None], are_labels: bool) -> bool:
    """Return whether the batches' lists hold an entry for each sample, and not columns.

    Such an entry is a dict; in a list of labels it may be anything.

    Raises:
        ValueError: If the entries of a list of labels may be both.
    """
    batches = list(zip(parts, sizes, strict=True))
    if any(not isinstance(part, (tuple, list)) or len(part) != size for part, size in batches):
        return False
    if all(isinstance(entry, Mapping) for part in parts for entry in part):
        return True
    if not (are_labels and isinstance(parts[0], list)):
        return False
    if all(isinstance(entry, np.ndarray) and entry.shape[:1] == (size,) for part, size in batches for entry in part):
        raise ValueError(
            f"labels are a list of {sizes[0]} tensors with {sizes[0]} rows in a batch of {sizes[0]} samples, which may "
            "be columns or samples; let data_collator return a tuple of columns, or a dict for each sample"
        )
    return True


def _chained(parts: list[Any]) -> list[Any]:
    """Return the entries of all batches. Empties the list."""
    entries = [map_tensors(_own, entry, np.ndarray) for part in parts for entry in part]
    parts.clear()
    return entries


def _check_kinds(name: str, parts: list[Any]) -> None:
    """Check that the batches have the same structure.

    Raises:
        ValueError: If they differ.
    """
    if len(kinds := dict.fromkeys(map(_kind, parts))) > 1:
        giver = "data_collator" if name in _LISTED else "preprocess_logits_for_metrics"
        raise ValueError(
            f"{name} of different batches are {' and '.join(kinds)}, which cannot be joined; let {giver} return the "
            "same for each batch, or set eval_do_concat_batches=False"
        )


def _kind(part: Any) -> str:
    if isinstance(part, np.ndarray):
        return "a tensor" if part.ndim < 2 else f"a tensor of {part.ndim} dimensions"
    if isinstance(part, (tuple, list)):
        return f"{len(part)} values"
    return f"a dict with {', '.join(map(str, part))}" if isinstance(part, Mapping) else "no tensor"


def _joined(name: str, parts: list[Any], fill: int) -> Any:
    """Concatenate the batches' arrays; pad those that differ in further dimensions. Empties the list."""
    _check_kinds(name, parts)
    if isinstance(parts[0], (tuple, list, Mapping)):
        return _by_entry(parts, lambda entries: _joined(name, entries, fill))
    if not isinstance(parts[0], np.ndarray):
        return [map_tensors(_wide, part, np.ndarray) for part in parts]
    parts[:] = map(np.atleast_1d, parts)  # one number of a batch
    if len({part.dtype for part in parts}) > 1:
        parts[:] = map(_wide, parts)
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        longest = np.max(list(shapes), axis=0)
        parts[:] = [
            np.pad(
                _wide(part),
                [(0, 0), *((0, int(full - own)) for full, own in zip(longest, part.shape[1:], strict=True))],
                constant_values=fill,
            )
            for part in parts
        ]
    joined = np.concatenate(parts)
    parts.clear()  # before the joined array is widened
    return _wide(joined)

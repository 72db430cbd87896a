"""`StreamEvaluation`: the batches of an evaluation over an iterable dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xxhash import xxh3_64

from trainer_kit.data.digest import digest
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.reader import StreamReader
from trainer_kit.data.sampling import Layout
from trainer_kit.loss.batch import Counts, count


def different_samples(role: str) -> str:
    """Return the warning for a stream of samples, called `role`, that differs between the processes."""
    return (
        f"{role} gives the processes different samples: if it divides itself by rank, or shuffles with a seed of each "
        "process, some are lost or repeated, since each process takes its share of the whole stream; give all of them "
        "the same one (where only random changes or times within the samples differ, nothing is lost)"
    )


class StreamEvaluation:
    """This process's batches of an evaluation over an iterable dataset, as of `evaluation_batches`.

    Every process reads the whole dataset. Its k-th batch is number k * readers + reader, in the order of the dataset
    or, with several workers, of their batches in turn.

    Args:
        dataset: The dataset.
        layout: Batch size and processes.
        reading: How samples are read.

    Attributes:
        fingerprint: Digest of what this process has read in the last pass, the same on all processes; 0 for one.
    """

    def __init__(self, dataset: Any, layout: Layout, reading: LoaderConfig) -> None:
        self.fingerprint = 0
        self._reader, self._layout = StreamReader(dataset, layout, reading), layout

    def __iter__(self) -> Iterator[tuple[Any, Counts, bool]]:
        layout, found = self._layout, xxh3_64()
        number, read = -1, None
        for number, read in enumerate(self._reader.rounds()):
            if layout.readers > 1:
                found.update(digest(read.parts) or b"")
            if number % layout.readers == layout.reader:
                for batch, samples in zip(read.parts, read.sizes, strict=True):
                    yield batch, count(batch, samples), False
        if read is not None and number % layout.readers < layout.reader:
            for batch, samples in zip(read.parts, read.sizes, strict=True):
                yield batch, count(batch, samples), True
        self.fingerprint = found.intdigest() if layout.readers > 1 else 0

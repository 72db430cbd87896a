"""Loaders without the first batches of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from trainer_kit.accelerator.loader import PreparedLoader


class SkippedLoader:
    """A loader without the first batches of its pass.

    Args:
        loader: The whole one, prepared or not.
        batches: How many are left out.
    """

    def __init__(self, loader: Any, batches: int) -> None:
        self.loader = loader
        self.batches = batches

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.batches)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            return self.loader.passing(self.batches)
        return islice(iter(self.loader), self.batches, None)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippedLoader:
    """The loader without the first `num_batches` batches of its pass, for the epoch in which a run was broken off.

    After `load_state` they are counted from the beginning of the pass that was broken off, not from where the loader
    would go on. No sample before them is read, unless the dataset is iterable or the loader not prepared.

    Raises:
        ValueError: If `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative; use 0 or more")
    if isinstance(dataloader, SkippedLoader):
        return SkippedLoader(dataloader.loader, dataloader.batches + num_batches)
    return SkippedLoader(dataloader, num_batches)

"""Loaders that skip the first batches of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.unavailable import member


class SkippedLoader(DataLoader[Any]):
    """A loader that skips the first batches of its pass.

    Args:
        loader: The complete loader, prepared or not.
        batches: Number of batches to skip.
    """

    def __init__(self, loader: Any, batches: int) -> None:
        # Not super().__init__(): the settings are the user's DataLoader's.
        self.loader = loader
        self.batches = batches

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # a DataLoader's own refuses to set attributes

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet in a copy
            raise AttributeError(name)
        return member(self.loader, "DataLoader", name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self.loader, PreparedLoader):
            return self.loader.passing(self.batches)
        return islice(iter(self.loader), self.batches, None)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippedLoader:
    """Return the loader without the first `num_batches` batches of its pass, for the epoch that was interrupted.

    After `load_state`, the count starts at the beginning of the interrupted pass, not at the batch where the loader
    would resume. The skipped samples are not read, unless the dataset is iterable or the loader is not prepared.

    Args:
        dataloader: Loader, prepared or not; a skipped one skips `num_batches` more.
        num_batches: Number of batches to skip.

    Returns:
        A loader over the remaining batches.

    Raises:
        ValueError: If `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative; use 0 or more")
    if isinstance(dataloader, SkippedLoader):
        return SkippedLoader(dataloader.loader, dataloader.batches + num_batches)
    return SkippedLoader(dataloader, num_batches)

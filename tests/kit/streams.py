"""A stream that divides itself over DataLoader workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Plain(IterableDataset[Any]):
    """Samples with noise of all three generators, divided over the workers."""

    def __init__(self, length: int, shards: tuple[int, ...] | None = None) -> None:
        self.length = length
        self.shards = shards  # samples of each worker, where they differ
        self.epoch = -7

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def mine(self) -> range:
        info = get_worker_info()
        if info is None:
            return range(self.length)
        if self.shards is None:
            return range(info.id, self.length, info.num_workers)
        start = sum(self.shards[: info.id])
        return range(start, start + self.shards[info.id])

    def sample(self, index: int) -> dict[str, Any]:
        noise = torch.rand(()).double() + np.random.rand() + random.random()
        return {"x": torch.tensor([index, float(noise), self.epoch], dtype=torch.float64)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self.mine():
            yield self.sample(index)

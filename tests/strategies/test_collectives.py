"""The collectives of a single process."""

from __future__ import annotations

import torch
from torch import nn

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.collectives import Collectives


def test_one_process_is_all_processes() -> None:
    strategy, x = Strategy(), torch.arange(3)
    assert (strategy.rank, strategy.collectives.local_rank, strategy.world_size) == (0, 0, 1)
    assert strategy.is_main
    assert strategy.collectives.is_local_main
    assert strategy.collectives.all_reduce(x) is x
    assert strategy.gather(x) is x
    assert strategy.collectives.gather_object({"a": 1}) == [{"a": 1}]
    assert strategy.collectives.broadcast("x") == "x"
    strategy.barrier()
    model = nn.Linear(2, 2)
    with strategy.no_sync(model):
        pass
    assert strategy.prepare(model) is model
    assert strategy.unwrap(model) is model
    assert strategy.model_state(model).keys() == model.state_dict().keys()
    assert list(strategy.prepare_loader([1, 2])) == [1, 2]
    assert not strategy.device_info.pins_memory
    strategy.collectives.rank = strategy.collectives.local_rank = 1
    assert not strategy.is_main
    assert not strategy.collectives.is_local_main


def test_readers_are_processes_that_read_the_same_batches() -> None:
    collectives = Collectives(rank=5, world_size=8)
    assert (collectives.reader, collectives.readers) == (5, 8)
    collectives.reader_size = 2
    assert (collectives.reader, collectives.readers) == (2, 4)
    assert collectives.once_a_reader([*"aabbccdd"]) == [*"abcd"]
    total = torch.tensor([6, 2**61])  # what all processes have, here alone
    assert collectives.sum_over_readers(total).tolist() == [3, 2**60]
    assert collectives.read_scalars([torch.tensor(3.0)], summed=True) == [1.5]
    assert collectives.read_scalars([torch.tensor(3.0)]) == [3.0]

"""Without sharding, each process has whole tensors."""

from __future__ import annotations

import torch

from trainer_kit.strategies.sharding import Sharding


def test_each_tensor_is_whole() -> None:
    sharding, tensor = Sharding(), torch.arange(4.0)
    assert not sharding.is_active
    assert sharding.count_shards(8) == 1
    assert sharding.placement(tensor) is None
    assert sharding.own_parts([tensor])[0] is tensor
    assert sharding.place_like(tensor, torch.zeros(4)) is tensor
    assert sharding.whole_tensors({"weight": tensor})["weight"] is tensor
    assert sharding.collect_on_main({"weight": tensor})["weight"] is tensor

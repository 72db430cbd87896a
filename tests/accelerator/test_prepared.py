"""The objects whose state is saved: how many there are, and none after they are dropped."""

from __future__ import annotations

import torch

from trainer_kit.accelerator.prepared import Prepared


def test_objects_are_counted_and_dropped() -> None:
    prepared = Prepared(models=[torch.nn.Linear(1, 1)], registered=[object(), object()])
    assert prepared.counts() == {"models": 1, "optimizers": 0, "schedulers": 0, "loaders": 0}
    prepared.clear()
    assert not any(prepared.counts().values())
    assert prepared.registered == []

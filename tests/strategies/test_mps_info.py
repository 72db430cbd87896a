"""Memory of an Apple GPU, as the driver tells it; the GPU is played."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.strategies.mps_info import MpsInfo

GIB = 2**30


def test_memory_in_tensors_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.mps.current_allocated_memory", lambda: 3 * GIB)
    monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda: 5 * GIB)
    monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 12 * GIB)
    info = MpsInfo(torch.device("mps"))
    figures = info.memory()
    assert figures["memory_gib"] == 3.0
    assert set(figures) == {"memory_gib", "peak_memory_gib"}
    assert info.free_memory() == 7 * GIB

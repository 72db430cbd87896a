"""The hint for fragmented GPU memory."""

from __future__ import annotations

import pytest

from trainer_kit.strategies.fragmentation import fragmentation_hint


@pytest.mark.parametrize(
    ("reserved", "peak", "expected"), [(40.0, 30.0, True), (40.0, 38.0, False), (1.5, 0.7, False), (2.0, 1.0, True)]
)
def test_only_a_large_loss_is_worth_a_hint(
    monkeypatch: pytest.MonkeyPatch, reserved: float, peak: float, expected: bool
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    hint = fragmentation_hint(reserved, peak)
    assert (hint is not None) is expected
    if hint is not None:
        assert hint.endswith("start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_there_is_none_where_they_are_in_use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:true")
    assert fragmentation_hint(40.0, 10.0) is None
    monkeypatch.setenv(name, "expandable_segments:False")
    assert fragmentation_hint(40.0, 10.0) is not None

"""Ranges of traces."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.profiling.trace_range import trace_range


@pytest.mark.parametrize("nvtx", [False, True])
def test_a_range_is_in_the_trace_and_in_nvtx_where_asked(monkeypatch: pytest.MonkeyPatch, nvtx: bool) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: marks.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("-"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with trace_range("outer", nvtx), trace_range("inner", nvtx):
            torch.ones(1)
        with pytest.raises(ValueError, match="wrong"), trace_range("broken", nvtx):
            raise ValueError("wrong")
    assert {"outer", "inner", "broken"} <= {event.name for event in profile.events()}
    assert marks == (["+outer", "+inner", "-", "-", "+broken", "-"] if nvtx else [])

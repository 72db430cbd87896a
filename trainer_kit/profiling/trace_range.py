"""Ranges of a profiler's trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def trace_range(name: str, nvtx: bool = False) -> Iterator[None]:
    """Mark a range in the trace of torch.profiler.

    Args:
        name: Name of the range.
        nvtx: Whether it is also a range of NVTX, which Nsight Systems shows; needs a PyTorch with CUDA.
    """
    with torch.profiler.record_function(name):
        if nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if nvtx:
                torch.cuda.nvtx.range_pop()

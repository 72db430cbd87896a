"""Layouts for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from trainer_kit.data.sampling import Layout

LIMITS = st.none() | st.integers(1, 9)


def layouts(
    batch_size: int, accumulation: int, readers: int, limits: st.SearchStrategy[int | None] = LIMITS
) -> st.SearchStrategy[Layout]:
    """Layouts of collated batches, as the first reader has them, up to these sizes."""
    sizes = (st.integers(1, largest) for largest in (batch_size, accumulation, readers))
    return st.builds(Layout, *sizes, st.just(0), limits, st.none())

"""Layouts for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from trainer_kit.data.sampling import Layout, kept_layout

LIMITS = st.none() | st.integers(1, 9)
NEVER = st.none()


def layouts(
    batch_size: int,
    accumulation: int,
    readers: int,
    limits: st.SearchStrategy[int | None] = LIMITS,
    full: st.SearchStrategy[int | None] = NEVER,
) -> st.SearchStrategy[Layout]:
    """Layouts of collated batches, as the first reader has them, up to these sizes.

    `full` draws the number of processes whose steps are kept.
    """
    sizes = (st.integers(1, largest) for largest in (batch_size, accumulation, readers))
    return st.builds(kept, *sizes, limits, full)


def kept(batch_size: int, accumulation: int, readers: int, limit: int | None = None, full: int | None = None) -> Layout:
    """The layout of the first of so many processes; with `full`, it keeps the steps of so many."""
    layout = Layout(batch_size, accumulation, readers, limit=limit)
    if full is None:
        return layout
    return kept_layout(layout, {"processes": full, "batch_size": batch_size, "accumulation": accumulation})

"""A hint for runs whose GPU memory is fragmented."""

from __future__ import annotations

from trainer_kit.config import environment
from trainer_kit.utils.units import GIB, format_size

_SHARE = 0.1
"""Share of the reserved memory that must be lost before there is a hint."""


def fragmentation_hint(reserved: float, peak: float) -> str | None:
    """Return a sentence about expandable segments; None if they would save little, or are in use.

    Args:
        reserved: GiB that torch's allocator holds.
        peak: GiB of tensors at their peak.
    """
    lost = reserved - peak
    if lost < max(1.0, _SHARE * reserved) or environment.has_expandable_segments():
        return None
    held, more = format_size(int(reserved * GIB)), format_size(int(lost * GIB))
    return (
        f"torch's allocator holds {held} of GPU memory, {more} more than tensors ever needed: the memory is "
        "fragmented; start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )

"""Checkpoints of small models that several processes write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainer_kit.checkpoint.format import ownership


@contextmanager
def parts_of(nbytes: int) -> Iterator[None]:
    """The context, or decorator, in which a process writes parts of this size; ranks live on between tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "PART_BYTES", nbytes)
        yield

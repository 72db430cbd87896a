"""Tensors as vectors share their memory where they can, and can be viewed as bytes."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.utils.vectors import as_bytes, as_vector

TABLE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("tensor", "shares"),
    [
        (TABLE, True),
        (TABLE[1:2, 3], True),
        (TABLE[1:2, 3:4], True),
        (TABLE[1, 3], True),
        (TABLE[::2, ::3], False),
        (TABLE.t(), False),
        (TABLE[:0], True),
        (TABLE[2:3, 1].double().expand(1), False),
        (torch.tensor(7, dtype=torch.int16), True),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else None,
)
def test_elements_are_in_order_and_viewed_as_bytes(tensor: torch.Tensor, shares: bool) -> None:
    vector = as_vector(tensor)
    assert vector.tolist() == tensor.reshape(-1).tolist()
    assert as_bytes(tensor).tolist() == list(tensor.reshape(-1).numpy().tobytes())
    if tensor.numel() and shares:
        assert vector.data_ptr() == tensor.data_ptr()

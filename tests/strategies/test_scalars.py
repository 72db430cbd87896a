"""Numbers of any library."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit.strategies.scalars import as_scalar, read_scalars
from trainer_kit.strategies.single import SingleDevice


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3), (True, True), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True),
        (np.array([[0.5]]), 0.5), (torch.tensor([[7]]), 7), (torch.tensor(True), True), (Fraction(1, 2), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
    ],
)  # fmt: skip
def test_what_holds_one_number_becomes_pythons(value: Any, expected: Any) -> None:
    found = as_scalar("figure", value)
    assert found == expected
    assert type(found) is type(expected)


def test_a_tensor_of_a_device_stays_there_as_a_scalar() -> None:
    found = as_scalar("figure", torch.zeros(1, 1, device="meta", requires_grad=True))
    assert isinstance(found, torch.Tensor)
    assert (found.shape, found.device.type, found.requires_grad) == ((), "meta", False)


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (torch.ones(2), r"a Tensor of shape \(2,\) and type torch.float32"),
        (np.ones((1, 2)), r"a ndarray of shape \(1, 2\) and type float64"),
        (torch.tensor(1j), r"a Tensor of shape \(\) and type torch.complex64"),
        ("x" * 200, r"'x{76}\.\.\., a str"),
        (Decimal("0.5"), r"Decimal\('0.5'\), a Decimal"),
        (None, "None, a NoneType"),
    ],
)
def test_anything_else_is_named(value: Any, described: str) -> None:
    with pytest.raises(TypeError, match=f"^'figure' is {described}; give a number"):
        as_scalar("figure", value)


def test_scalar_tensors_are_read_together_and_the_rest_is_kept() -> None:
    strategy = SingleDevice("cpu")
    strategy.setup()
    values = {"a": torch.tensor(0.5), "b": 2, "c": torch.tensor(3), "d": torch.tensor(0.25), "e": "text"}
    assert read_scalars(values, strategy) == {"a": 0.5, "b": 2, "c": 3, "d": 0.25, "e": "text"}
    assert [*read_scalars(values, strategy)] == [*"abcde"]

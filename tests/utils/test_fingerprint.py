"""`fingerprint`: equal for equal bits, and different after each kind of change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer_kit.utils import fingerprint as module
from trainer_kit.utils.fingerprint import fingerprint, fingerprints

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 7, 64, 65])
def test_each_change_of_one_element_counts(dtype: torch.dtype, length: int) -> None:
    values = torch.arange(length).remainder(2).to(dtype)
    same = fingerprint(values)
    assert same.shape == ()
    assert torch.equal(fingerprint(values.clone()), same)
    assert torch.equal(fingerprint(torch.cat([values[:1], values])[1:]), same) or dtype.itemsize < 4  # of an odd offset
    other = values.clone().view(torch.uint8)
    found = set()
    for place in range(other.numel()):
        other[place] ^= 1
        found.add(int(fingerprint(other.view(dtype))))
        other[place] ^= 1
    assert len(found) == other.numel()
    assert int(same) not in found
    other[:1] ^= 1
    assert len({*fingerprints([values, values.clone(), other.view(dtype)])}) == min(length, 1) + 1


@pytest.mark.parametrize(
    "change", [lambda x: -x, lambda x: x.flip(0), lambda x: x.roll(1), lambda x: x.roll(16), lambda x: x * 2]
)
@pytest.mark.parametrize("length", [2, 4, 16, 64, 320])
def test_changes_with_a_pattern_count(
    change: Callable[[torch.Tensor], torch.Tensor], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 16)
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    changed = change(values)
    assert torch.equal(values, changed) == torch.equal(fingerprint(values), fingerprint(changed))


def test_views_of_other_strides_are_read_in_order() -> None:
    values = torch.randn(6, 4)
    assert torch.equal(fingerprint(values.t()), fingerprint(values.t().contiguous()))
    assert torch.equal(fingerprint(torch.ones(1).expand(5)), fingerprint(torch.ones(5)))
    assert torch.equal(fingerprint(torch.nn.Parameter(values)), fingerprint(values))

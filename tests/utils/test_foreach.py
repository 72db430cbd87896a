"""Copies of many tensors with few kernels."""

from __future__ import annotations

import torch
from kit.launches import Launches

from trainer_kit.utils.foreach import copy_all


def test_tensors_of_several_dtypes_and_strides_are_copied_by_a_kernel_each() -> None:
    kinds = [torch.float32, torch.int64, torch.bfloat16] * 5
    sources = [torch.arange(6).to(dtype).reshape(2, 3) + number for number, dtype in enumerate(kinds)]
    sources += [torch.rand(3, 2).t(), torch.rand(3, 2).t(), torch.tensor(7)]
    targets = [torch.zeros(each.shape, dtype=each.dtype) for each in sources]
    with Launches() as mixed:
        torch._foreach_copy_(targets, sources)
    assert mixed.count == 18
    for target in targets:
        target.zero_()
    with Launches() as grouped:
        copy_all(targets, sources)
    assert grouped.count == 3 + 2  # three dtypes, and two that are transposed
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


def test_a_copy_may_change_the_dtype() -> None:
    source = [torch.rand(3).bfloat16(), torch.rand(2).half(), torch.rand(2)]
    target = [torch.zeros(each.shape) for each in source]
    with Launches() as launches:
        copy_all(target, source)
    assert launches.count == 3
    assert all(torch.equal(new, old.float()) for new, old in zip(target, source, strict=True))


def test_nothing_to_copy_launches_nothing() -> None:
    with Launches() as launches:
        copy_all([], [])
    assert launches.count == 0

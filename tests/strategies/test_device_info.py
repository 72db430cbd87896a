"""The host as a device: its memory, its generators, and copies on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer_kit.strategies.base import Strategy


def test_memory_is_in_gib() -> None:
    figures = Strategy().device_info.memory()
    assert set(figures) == {"memory_gib", "peak_memory_gib"}
    assert 0.02 < figures["memory_gib"] <= figures["peak_memory_gib"] < 1024
    held = np.ones(2**27 // 8)  # 1/8 GiB
    assert Strategy().device_info.memory()["memory_gib"] > figures["memory_gib"] + 0.1
    del held
    assert Strategy().device_info.memory()["peak_memory_gib"] > figures["memory_gib"] + 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copies_on_the_host_are_nobody_elses(dtype: torch.dtype) -> None:
    strategy = Strategy()
    strategy.setup()
    tensors = [torch.arange(6).reshape(2, 3).to(dtype), torch.ones((), dtype=dtype), torch.ones(0, 2, dtype=dtype)]
    tensors.append(tensors[0].t())
    copies = strategy.device_info.host_memory(tensors)
    strategy.device_info.copy_to_host(tensors, copies)
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))
    tensors[0].zero_()
    assert copies[0].sum() == 15
    places = {copy.data_ptr() for copy in copies}
    again = strategy.device_info.host_memory(tensors[:3], copies)
    strategy.device_info.copy_to_host(tensors[:3], again)
    assert all(torch.equal(*pair) for pair in zip(tensors, again, strict=False))
    assert {copy.data_ptr() for copy in again} <= places
    other = strategy.device_info.host_memory([torch.ones(5), torch.ones(5)], again)
    assert other[0].data_ptr() != other[1].data_ptr()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 8.00 KB)"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_does_not_suffice(error: Exception, expected: bool) -> None:
    said = Strategy().device_info.oom_message(error)
    assert said == ((str(error) or "MemoryError") if expected else None)


def test_copies_on_the_host_lie_as_the_tensors_do() -> None:
    strategy = Strategy()
    strategy.setup()
    tensors = [
        torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.rand(4, 3).t(),
        torch.rand(4, 6)[:, ::2],
    ]
    places = strategy.device_info.host_memory(tensors)
    assert [place.stride() for place in places] == [tensor.clone().stride() for tensor in tensors]
    strategy.device_info.copy_to_host(tensors, places)
    assert all(torch.equal(place, tensor) for place, tensor in zip(places, tensors, strict=True))
    again = strategy.device_info.host_memory([torch.rand(3, 4), *tensors], free=places)
    assert [any(one is place for place in places) for one in again] == [False, True, True, True]

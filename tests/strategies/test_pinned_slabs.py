"""Page-locked copies of many tensors in a few slabs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.fake_cuda import Gpus

from trainer_kit.strategies.cuda_info import CudaInfo
from trainer_kit.strategies.pinned_slabs import ALIGNMENT, pinned_places, plan

# Parameters of a transformer, of ResNet-50's shape of sizes, and of a single layer.
STATES = {
    "GPT-2": [50257 * 768, 1024 * 768, *[768 * 2304, 2304, 768 * 768, 768, 768 * 3072, 3072, 3072 * 768] * 12],
    "ResNet": [2**number * 9 * 64 for number in range(10)] * 5 + [64 * 2**number for number in range(6)] * 20,
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("with_steps", [False, True])
def test_slabs_take_little_more_than_the_state(name: str, with_steps: bool) -> None:
    """Alone, tensors take a power of two each: 1.66 times GPT-2's state."""
    sizes = [-(-4 * size // ALIGNMENT) * ALIGNMENT for size in STATES[name] * 3]
    sizes += [ALIGNMENT] * len(STATES[name]) if with_steps else []
    slabs, _ = plan(sizes)
    assert sum(slabs) < 1.05 * sum(sizes)
    assert len(slabs) < 10
    assert all(slab.bit_count() == 1 for slab in slabs)
    alone = sum(1 << (size - 1).bit_length() for size in sizes)
    assert alone > 1.15 * sum(sizes)


@given(st.lists(st.integers(0, 2**22).map(lambda size: size * ALIGNMENT), max_size=40))
def test_no_tensor_shares_its_place(sizes: list[int]) -> None:
    slabs, starts = plan(sizes)
    places = sorted((slab, start, start + size) for (slab, start), size in zip(starts, sizes, strict=True) if size)
    for slab, start, end in places:
        assert 0 <= start < end <= slabs[slab]
        assert start % ALIGNMENT == 0
    assert all(one[0] < other[0] or one[2] <= other[1] for one, other in itertools.pairwise(places))
    assert sum(slabs) <= 2 * sum(sizes)


def test_places_are_like_the_tensors(gpus: Gpus) -> None:
    tensors = [
        torch.rand(3, 5, device="cuda"),
        torch.rand(4, 3, 2, 2, device="cuda").to(memory_format=torch.channels_last),
        torch.rand(2, 7, device="cuda").double().t(),
        torch.tensor(3.0, device="cuda"),
        torch.zeros(0, 4, device="cuda"),
        torch.tensor([True, False, True], device="cuda"),
        torch.rand(5, device="cuda").to(torch.complex64),
        torch.rand(3, device="cuda").bfloat16(),
    ]
    places = pinned_places(tensors)
    assert [(each.shape, each.dtype, each.stride()) for each in places] == [
        (each.shape, each.dtype, each.clone().stride()) for each in tensors
    ]
    assert all(place.is_pinned() for place in places if place.numel())
    assert gpus.pinned.blocks == 1
    info = CudaInfo(torch.device("cuda", 0))
    info.copy_to_host(tensors, places)
    assert all(torch.equal(place, tensor.cpu()) for place, tensor in zip(places, tensors, strict=True))


def test_memory_is_used_again_and_given_back(gpus: Gpus) -> None:
    info = CudaInfo(torch.device("cuda", 0))
    tensors = [torch.rand(100, device="cuda") for _ in range(20)]
    places = info.host_memory(tensors)
    held = gpus.pinned.held
    assert 20 * 400 <= held < 2 * 20 * 448
    again = info.host_memory([*tensors, torch.rand(3, device="cuda")], places)
    assert {*map(id, places)} == {*map(id, again[:20])}
    assert gpus.pinned.held == held + 64
    del places, again
    assert gpus.pinned.held == held + 64
    info.release_host_memory()
    assert gpus.pinned.held == 0


def test_copies_of_host_tensors_are_not_page_locked(gpus: Gpus) -> None:
    info = CudaInfo(torch.device("cuda", 0))
    tensors = [torch.tensor(1.0), torch.tensor(2.0, device="cuda"), torch.zeros(0, device="cuda")]
    places = info.host_memory(tensors)
    assert [place.is_pinned() for place in places] == [False, True, False]
    again = info.host_memory(tensors[::-1], places)
    assert all(one is other for one, other in zip(again[::-1], places, strict=True))

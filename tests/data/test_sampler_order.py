from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, WeightedRandomSampler

from trainer_kit import balanced_sampler
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.sampled_loader import SampledLoader
from trainer_kit.data.sampler_order import SamplerOrder, batch_slots, batch_steps, evaluation_plan
from trainer_kit.data.sampling import Layout


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    readers=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    limit=st.none() | st.integers(1, 4),
)
def test_every_batch_of_a_batch_sampler_comes_once_on_one_rank(
    sizes: list[int], readers: int, accumulation: int, limit: int | None
) -> None:
    ends = np.cumsum([0, *sizes]).tolist()
    batches = [[*range(start, stop)] for start, stop in itertools.pairwise(ends)]
    order = SamplerOrder(batches, 0).draw(0)
    layouts = [Layout(max(sizes), accumulation, readers, reader, limit) for reader in range(readers)]
    plans = [[*batch_slots(order, 0, 0, layout)] for layout in layouts]
    assert len({len(plan) for plan in plans}) == 1
    found: list[int] = []
    for slots in zip(*plans, strict=True):
        assert len({(slot.window_start, slot.window_stop, slot.is_last, slot.closes_epoch) for slot in slots}) == 1
        found += [index for slot in slots if not slot.is_dummy for index in slot.indices]
    assert sorted(found) == [*range(sum(sizes))]
    steps = sum(slot.is_last for slot in plans[0])
    assert steps == batch_steps(order, 0, layouts[0]) == -(-len(sizes) // (readers * accumulation))
    first = next(slot for slot in plans[0] if slot.is_last)
    assert [*batch_slots(order, 0, first.window_stop, layouts[0])] == plans[0][first.micro_batch_index + 1 :]
    evaluated = [
        index
        for layout in layouts
        for slot in evaluation_plan(order, layout)
        if not slot.is_dummy
        for index in slot.indices
    ]
    assert sorted(evaluated) == [*range(sum(sizes))]


def test_an_order_follows_from_seed_and_epoch() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = SamplerOrder(RandomSampler(range(50)), 7)
    orders = [one.draw(epoch).indices.tolist() for epoch in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    other = SamplerOrder(RandomSampler(range(50)), 7)
    assert [other.draw(epoch).indices.tolist() for epoch in (1, 0)] == orders[::-1]
    assert orders[0] != orders[1]
    assert SamplerOrder(RandomSampler(range(50)), 8).draw(0).indices.tolist() != orders[0]
    assert one.draw(0).fingerprint == other.draw(0).fingerprint != other.draw(1).fingerprint


@pytest.mark.parametrize("sampler", [["a", "b"], [1.5, 2.0], [[1], 2]])
def test_what_is_no_index_is_refused(sampler: Any) -> None:
    with pytest.raises(TypeError, match=r"the list gave .*; it must give indices of train_dataset"):
        SamplerOrder(sampler, 0).draw(0)


def test_whether_a_sampler_yields_batches_is_known_of_a_loader() -> None:
    sized = [(0, 32), (1, 64)]  # an index and a size of the image
    for in_batches in (None, False):
        with pytest.raises(TypeError, match="the list gave "):
            SamplerOrder(sized, 0, in_batches).draw(0)
    with pytest.raises(TypeError, match="the list gave "):
        SamplerOrder([[0, 1]], 0, in_batches=False).draw(0)
    with pytest.raises(TypeError, match="the list gave 0"):
        SamplerOrder([0, 1], 0, in_batches=True).draw(0)
    assert SamplerOrder([(0, 1), (2,)], 0, in_batches=True).draw(0).ends == [2, 3]


@pytest.mark.parametrize("readers", [1, 2])
def test_each_draw_of_a_sample_has_its_own_randomness(readers: int) -> None:
    drawn = [3, 1, 3, 3, 1, 0]

    class Noisy:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return torch.rand(()).item()

    def noises(order: list[int], batch_size: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for reader in range(readers):
            layout = Layout(batch_size, 1, readers, reader)
            loader = SampledLoader(Noisy(), layout, LoaderConfig(list, 0), SamplerOrder(order, 0))
            steps = loader.steps_left(0, 0)
            for micro in loader.micro_batches(0, 0, steps):
                found |= {micro.start + number: value for number, value in enumerate(micro.batch)}
        return found

    found = noises(drawn, 2)
    assert len({*found.values()}) == len(drawn)
    assert noises(drawn, 3) == found
    once = noises([3, 1, 0], 1)
    assert [found[0], found[1], found[5]] == [once[0], once[1], once[2]]


def test_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the list gave nothing in epoch 0"):
        SamplerOrder([], 0).draw(0)


def test_a_balanced_sampler_draws_every_class_equally_often() -> None:
    labels = [0] * 90 + [1] * 9 + [2]
    sampler = balanced_sampler(labels, 3000)
    assert isinstance(sampler, WeightedRandomSampler)
    drawn = Counter(labels[index] for index in SamplerOrder(sampler, 0).draw(0).indices)
    assert all(900 < drawn[label] < 1100 for label in range(3))
    assert len(balanced_sampler(torch.tensor(labels))) == 100
    with pytest.raises(ValueError, match=r"labels of shape \[2, 2\] are no list of classes"):
        balanced_sampler([[0, 1], [1, 0]])

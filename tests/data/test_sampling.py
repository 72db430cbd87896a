"""The order of samples: hypothesis draws the layouts, each sample of an epoch must come exactly once."""

from __future__ import annotations

import dataclasses
import itertools
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.layouts import layouts

from trainer_kit.data.run_length import RunLength
from trainer_kit.data.sampling import (
    GROUP,
    BatchIndices,
    Layout,
    epoch_length,
    evaluation_slots,
    kept_layout,
    mix,
    permutation,
    slots,
    steps_between,
)

relaxed = settings(max_examples=150)

lengths = st.integers(0, 200)
uncut = layouts(9, 5, 4, limits=st.none())
any_layout = layouts(9, 5, 4) | layouts(9, 5, 6, full=st.integers(1, 6))
kept_layouts = layouts(9, 5, 6, full=st.integers(1, 6)).filter(lambda layout: layout.full is not None)
seeds = st.integers(0, 2**32 - 1)


def ranks(layout: Layout) -> list[Layout]:
    return [layout._replace(reader=rank) for rank in range(layout.readers)]


def plans(order: torch.Tensor, position: int, layout: Layout) -> list[list[BatchIndices]]:
    """The slots of every rank."""
    return [list(slots(order, 0, position, each)) for each in ranks(layout)]


def seen(plan: list[list[BatchIndices]]) -> list[int]:
    return [index for rank in plan for slot in rank if not slot.is_dummy for index in slot.indices]


@dataclasses.dataclass
class Step:
    """One optimizer step, over all ranks."""

    start: int
    stop: int
    indices: set[int]


def steps_of(plan: list[list[BatchIndices]]) -> list[Step]:
    found: dict[int, Step] = {}
    for rank in plan:
        for slot in rank:
            step = found.setdefault(slot.window_stop, Step(slot.start, slot.window_stop, set()))
            if not slot.is_dummy:
                step.start = min(step.start, slot.start)
                step.indices |= set(slot.indices)
    return list(found.values())


@relaxed
@given(lengths, any_layout, seeds, st.data())
def test_each_sample_exactly_once_from_any_position(
    length: int, layout: Layout, seed: int, data: st.DataObject
) -> None:
    order = permutation(length, seed, 0)
    position = data.draw(st.integers(0, length))
    assert sorted(seen(plans(order, position, layout))) == sorted(order[position:].tolist())


@relaxed
@given(lengths, any_layout, st.data())
def test_resuming_at_any_step_gives_exactly_the_remaining_slots(
    length: int, layout: Layout, data: st.DataObject
) -> None:
    order = permutation(length, 3, 1)
    boundaries = [0, *range(layout.global_batch_size, length, layout.global_batch_size)]
    position = data.draw(st.sampled_from(boundaries))
    for whole, rest in zip(plans(order, 0, layout), plans(order, position, layout), strict=True):
        assert rest == [slot for slot in whole if slot.window_stop > position]


@relaxed
@given(lengths, any_layout, any_layout)
def test_a_step_holds_the_same_samples_under_any_layout_with_the_same_global_batch(
    length: int, one: Layout, other: Layout
) -> None:
    other = Layout(one.global_batch_size, limit=other.limit)
    assert one.global_batch_size == other.global_batch_size
    order = permutation(length, 7, 2)
    assert steps_of(plans(order, 0, one)) == steps_of(plans(order, 0, other))


@relaxed
@given(lengths, any_layout)
def test_ranks_take_the_same_number_of_batches_and_agree_on_the_step(length: int, layout: Layout) -> None:
    def shape(slot: BatchIndices) -> tuple[object, ...]:
        return slot.micro_batch_index, slot.is_last, slot.window_stop, slot.closes_epoch, slot.epoch

    plan = plans(permutation(length, 1, 0), 0, layout)
    assert all([shape(slot) for slot in rank] == [shape(slot) for slot in plan[0]] for rank in plan)
    for rank in plan:
        assert all(1 <= len(slot.indices) <= layout.at_once for slot in rank)
        for slot, after in pairwise(rank):
            assert after.micro_batch_index == (0 if slot.is_last else slot.micro_batch_index + 1)
        assert not rank or (rank[0].micro_batch_index == 0 and rank[-1].is_last)
    assert sum(slot.is_last for slot in plan[0]) == steps_between(0, length, layout)
    assert [slot.closes_epoch for slot in plan[0]] == [slot.window_stop == length for slot in plan[0]]


@relaxed
@given(lengths, any_layout)
def test_a_stand_in_counts_nothing_and_holds_real_samples(length: int, layout: Layout) -> None:
    order = permutation(length, 1, 0)
    for rank in plans(order, 0, layout):
        for slot in rank:
            most = min(2, layout.at_once, slot.window_stop - slot.start)
            assert not slot.is_dummy or len(slot.indices) == most
            assert slot.indices == order[slot.start : slot.start + len(slot.indices)].tolist()


@relaxed
@given(lengths, layouts(9, 5, 4))
def test_a_limit_only_cuts_what_a_rank_has(length: int, layout: Layout) -> None:
    """Each rank has the samples that it has without it, step by step, in parts that differ by one sample at most."""
    order = permutation(length, 1, 0)
    for cut, whole in zip(plans(order, 0, layout), plans(order, 0, layout._replace(limit=None)), strict=True):
        for stop in {slot.window_stop for slot in whole}:
            parts = [slot.indices for slot in cut if not slot.is_dummy and slot.window_stop == stop]
            micro_batches = [slot.indices for slot in whole if not slot.is_dummy and slot.window_stop == stop]
            assert [*itertools.chain(*parts)] == [*itertools.chain(*micro_batches)]
            for micro_batch in micro_batches:
                own = [part for part in parts if part[0] in micro_batch]
                assert len(own) == layout.parts(len(micro_batch))
                assert max(map(len, own)) - min(map(len, own)) <= 1


@relaxed
@given(lengths, kept_layouts)
def test_a_kept_step_is_dealt_evenly(length: int, layout: Layout) -> None:
    """Shares and micro-batches differ by one sample at most; the steps are those of the full number of processes."""
    assert layout.full is not None
    order = permutation(length, 1, 0)
    plan = plans(order, 0, layout)
    for stop in {slot.window_stop for slot in plan[0]}:
        own = [
            [0 if slot.is_dummy else len(slot.indices) for slot in rank if slot.window_stop == stop] for rank in plan
        ]
        shares, sizes = [sum(each) for each in own], [size for each in own for size in each]
        assert max(shares) - min(shares) <= 1
        assert max(sizes) - min(sizes) <= 1
        if sum(shares) == layout.global_batch_size:
            assert shares == layout.shares
            assert (max(sizes), len(own[0])) == (layout.at_once, layout.passes)
        assert max(sizes) <= layout.at_once <= layout.pass_size <= min(layout.batch_size, layout.padded_size)
        # No more passes than the fullest share needs.
        assert len(own[0]) == -(-max(shares) // layout.at_once)
    assert steps_of(plan) == steps_of(plans(order, 0, layout.full))


@relaxed
@given(lengths, kept_layouts, st.data())
def test_full_size_restored_is_the_original_layout(length: int, layout: Layout, data: st.DataObject) -> None:
    assert layout.full is not None
    original = layout.full._replace(limit=None)
    saved = RunLength(layout, 9, 3.0, 9, 3, {}).state_dict()
    for readers in data.draw(st.lists(st.integers(1, 7), max_size=3)):
        smaller = kept_layout(original._replace(readers=readers), saved)
        assert smaller.global_batch_size == original.global_batch_size
        saved = RunLength(smaller, 9, 3.0, 9, 3, {}).state_dict()
    assert kept_layout(original, saved) == original


def test_what_the_user_changes_counts() -> None:
    """Batch size times accumulation: only the number of processes is not the user's wish."""
    saved = RunLength(Layout(4, 2, 3), 9, 3.0, 9, 3, {}).state_dict()
    assert kept_layout(Layout(4, 2, 2), saved).global_batch_size == 24
    assert kept_layout(Layout(2, 4, 2), saved).global_batch_size == 24
    assert kept_layout(Layout(4, 3, 2), saved) == Layout(4, 3, 2)
    assert kept_layout(Layout(3, 2, 2), saved) == Layout(3, 2, 2)
    earlier = {"processes": 3, "batch_size": 4, "accumulation": 2, "units": {}}  # of a version that wrote less
    assert kept_layout(Layout(4, 2, 2), earlier) == kept_layout(Layout(4, 2, 2), saved)


def test_devices_of_one_process_are_kept_too() -> None:
    saved = RunLength(Layout(4 * 8, devices=8), 9, 3.0, 9, 3, {}).state_dict()
    for devices, pass_size, padded, passes in ((4, 16, 16, 2), (6, 16, 18, 2), (3, 11, 12, 3), (16, 32, 32, 1)):
        layout = kept_layout(Layout(4 * devices, devices=devices), saved)
        assert layout.global_batch_size == sum(layout.shares) == 32
        assert len(layout.shares) == devices
        assert (layout.pass_size, layout.padded_size, layout.passes) == (pass_size, padded, passes)


def test_a_short_last_step_is_spread_with_stand_ins() -> None:
    layout = Layout(batch_size=2, accumulation=2, readers=3)  # 12 a step, 6 a row
    plan = plans(torch.arange(15), 0, layout)
    last = [[(slot.indices, not slot.is_dummy) for slot in rank if slot.window_stop == 15] for rank in plan]
    assert last == [[([12, 13], True)], [([14], True)], [([12, 13], False)]]


@relaxed
@given(lengths, any_layout, any_layout, any_layout, st.data())
def test_changing_the_layout_in_mid_epoch_keeps_each_sample_exactly_once(
    length: int, first: Layout, second: Layout, third: Layout, data: st.DataObject
) -> None:
    order = permutation(length, 11, 4)
    position, found = 0, []
    for layout in (first, second):
        taken = data.draw(st.integers(0, steps_between(position, length, layout)))
        stop = min(position + taken * layout.global_batch_size, length)
        found += [i for step in steps_of(plans(order, position, layout)) if step.stop <= stop for i in step.indices]
        position = stop
    found += seen(plans(order, position, third))
    assert sorted(found) == list(range(length))


passed_over = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=4).map(
    lambda found: [(start, start + size) for start, size in found]
)


@relaxed
@given(st.integers(0, 80), st.lists(any_layout, min_size=1, max_size=4), passed_over, st.data())
def test_what_is_not_passed_over_comes_exactly_once_however_the_layout_changes(
    length: int, chain: list[Layout], ranges: list[tuple[int, int]], data: st.DataObject
) -> None:
    order = permutation(length, 11, 4)
    expected = [place for place in range(length) if not any(start <= place < stop for start, stop in ranges)]
    position, found = 0, list[int]()
    for number, layout in enumerate(chain):
        plans = [list(slots(order, 0, position, each, ranges)) for each in ranks(layout)]
        steps = steps_of(plans)
        assert len(steps) == steps_between(position, length, layout, ranges)
        assert len(steps) <= steps_between(position, length, layout) + len(ranges)
        closing = [slot.closes_epoch for slot in plans[0] if slot.is_last]
        assert closing == [False] * (len(steps) - 1) + [True] * bool(steps)
        taken = data.draw(st.integers(0, len(steps))) if number < len(chain) - 1 else len(steps)
        for slot in (slot for plan in plans for slot in plan if not slot.is_dummy):
            assert slot.window_start <= slot.start < slot.window_stop
        for step in steps[:taken]:
            assert step.start >= position
            # Nothing is left out inside a step.
            assert len(step.indices) == step.stop - step.start <= layout.global_batch_size
            found += step.indices
            position = step.stop
    assert sorted(found) == sorted(order[expected].tolist())


def test_a_range_that_steps_took_is_passed_over_by_the_same_steps() -> None:
    layout = Layout(2, 2)
    whole = [slot for slot in slots(torch.arange(30), 0, 0, layout) if slot.is_last]
    rest = [slot for slot in slots(torch.arange(30), 0, 0, layout, [(8, 16)]) if slot.is_last]
    assert [slot.window_stop for slot in whole] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert [slot.window_stop for slot in rest] == [4, 8, 20, 24, 28, 30]
    assert rest[2].window_start == 16


@relaxed
@given(lengths, uncut)
def test_drop_last_leaves_full_batches_on_every_rank(length: int, layout: Layout) -> None:
    used = epoch_length(length, layout, drop_last=True)
    assert length - layout.global_micro_batch_size < used <= length
    assert epoch_length(length, layout, drop_last=False) == length
    for rank in plans(permutation(length, 1, 0)[:used], 0, layout):
        assert all(not slot.is_dummy and len(slot.indices) == layout.batch_size for slot in rank)


@relaxed
@given(lengths, any_layout, st.data())
def test_steps_between_counts_what_slots_gives(length: int, layout: Layout, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, length))
    plan = list(slots(torch.arange(length), 0, position, layout))
    assert steps_between(position, length, layout) == sum(slot.is_last for slot in plan)


@relaxed
@given(lengths, uncut)
def test_evaluation_goes_through_the_dataset_once_in_its_order(length: int, layout: Layout) -> None:
    plan = [list(evaluation_slots(length, each)) for each in ranks(layout)]
    rows = [*zip(*plan, strict=True)]
    assert [i for row in rows for slot in row if not slot.is_dummy for i in slot.indices] == list(range(length))
    assert all(not slot.is_dummy for row in rows[:-1] for slot in row)


@relaxed
@given(st.integers(0, 500), seeds, st.integers(0, 1000))
def test_an_epoch_is_a_permutation_that_seed_and_epoch_alone_choose(length: int, seed: int, epoch: int) -> None:
    torch.manual_seed(random.getrandbits(32))
    order = permutation(length, seed, epoch)
    assert sorted(order.tolist()) == list(range(length))
    torch.manual_seed(random.getrandbits(32))
    assert torch.equal(order, permutation(length, seed, epoch))
    if length >= 20:
        assert not torch.equal(order, permutation(length, seed, epoch + 1))
        assert not torch.equal(order, permutation(length, seed + 1, epoch))


def test_the_order_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = (torch.rand(1).item(), np.random.rand(), random.random())
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    permutation(100, 1, 2, np.arange(100))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


@relaxed
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 60), seeds)
@example([1], 1, 0)
def test_grouping_by_length_is_a_permutation(sample_lengths: list[int], repeat: int, seed: int) -> None:
    lengths = np.array(sample_lengths * repeat)
    order = permutation(len(lengths), seed, 0, lengths).numpy()
    assert sorted(order.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize("count", [GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 17])
def test_groups_are_sorted_from_long_to_short(count: int) -> None:
    lengths = np.random.default_rng(0).permutation(count)
    order = permutation(count, 9, 3, lengths).numpy()
    falls = np.flatnonzero(np.diff(lengths[order]) > 0)  # where a new group begins
    assert len(falls) <= max(-(-count // GROUP), 4) - 1
    for epoch in range(8):  # running out of memory shows at once
        assert lengths[permutation(count, 9, epoch, lengths)[0]] == lengths.max()
    batches = [lengths[order[start : start + 8]] for start in range(0, count, 8)]
    shuffled = permutation(count, 9, 3).numpy()
    plain = [lengths[shuffled[start : start + 8]] for start in range(0, count, 8)]
    padding = sum((batch.max() - batch).sum() for batch in batches)
    assert padding * 5 < sum((batch.max() - batch).sum() for batch in plain)


def test_a_small_dataset_is_shuffled_too() -> None:
    """Also which samples `drop_last` drops."""
    lengths, batches, last = np.arange(1, 604), set[frozenset[int]](), set[int]()
    for epoch in range(10):
        order = permutation(603, 1, epoch, lengths).tolist()
        batches |= {frozenset(order[start : start + 8]) for start in range(0, 600, 8)}
        last |= {*order[600:]}
    assert len(batches) > 740
    assert len(last) >= 9  # not always the same three


def test_grouping_shuffles_anew_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    orders = [permutation(300, 1, epoch, lengths) for epoch in range(2)]
    assert not torch.equal(*orders)


@relaxed
@given(st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=4))
def test_mixed_seeds_suit_every_generator(numbers: list[int]) -> None:
    value = mix(*numbers)
    assert 0 <= value < 2**63
    assert value == mix(*numbers)
    torch.Generator().manual_seed(value)
    random.Random(value)


def test_mixing_tells_its_arguments_apart() -> None:
    grid = range(-1, 30)
    values = {mix(a, b, c) for a in grid for b in grid for c in grid} | {mix(a, b) for a in grid for b in grid}
    assert len(values) == len(grid) ** 3 + len(grid) ** 2
    low = np.bincount([mix(1, 2, c) % 16 for c in range(16_000)])
    assert low.min() > 850  # 1000 each, give or take five standard deviations
    assert low.max() < 1150


@pytest.mark.parametrize("length", [1, 1000, 100_003])
def test_a_permutation_takes_four_bytes_a_sample_and_is_that_of_randperm(length: int) -> None:
    expected = torch.randperm(length, generator=torch.Generator().manual_seed(mix(3, 1)))
    order = permutation(length, 3, 1)
    assert order.tolist() == expected.tolist()
    assert order.untyped_storage().nbytes() == 4 * length


def test_the_order_of_an_evaluation_is_made_as_it_is_read() -> None:
    """All indices of so many samples would take 8 TB."""
    plan = evaluation_slots(10**12, Layout(batch_size=4, readers=2, reader=1))
    assert [slot.indices for slot in itertools.islice(plan, 2)] == [[4, 5, 6, 7], [12, 13, 14, 15]]

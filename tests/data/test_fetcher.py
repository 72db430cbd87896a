from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.layouts import layouts

from trainer_kit.data.collate import stack
from trainer_kit.data.fetcher import Fetcher
from trainer_kit.data.sampling import BatchIndices, Layout, evaluation_slots, mix, permutation, slots
from trainer_kit.errors import DataError
from trainer_kit.utils.rng import generator_states, seed_generators, set_generator_states

LENGTH = 40


class Drawing:
    """Samples that hold what the generators gave them, and how often each was read."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reads = [0] * LENGTH
        self.own = np.random.default_rng() if kind == "own" else None
        self.of_epoch: Any = None

    def set_epoch(self, epoch: int) -> None:
        if self.kind == "own, with the epoch":
            self.of_epoch = random.Random(epoch)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return {"index": index, "noise": torch.tensor(self.noise(index), dtype=torch.float64)}

    def noise(self, index: int) -> float:
        if self.kind == "torch":
            return torch.rand(()).item()
        if self.kind == "numpy":
            return np.random.rand()
        if self.kind == "random":
            return random.random()
        if self.kind == "normal":  # each of these keeps a second number for the next call
            return random.gauss(0, 1) + np.random.standard_normal() + torch.randn(()).item()
        if self.kind == "mixed":
            return [torch.rand(()).item, np.random.rand, random.random][index % 3]()
        if self.kind == "some":
            return random.random() if index % 7 == 3 else 0.0
        if self.kind == "own":
            return float(self.own.random())
        if self.kind == "own, made late":
            self.late = getattr(self, "late", None) or random.Random()
            return self.late.random()
        if self.kind == "own, with the epoch":
            return self.of_epoch.random()
        if self.kind == "a state, read":
            return float(np.random.get_state()[1][0]) + random.getstate()[1][0] + torch.initial_seed() % 997
        if self.kind == "a state, restored":
            states = generator_states()
            drawn = np.random.rand() + random.random() + torch.rand(()).item()
            set_generator_states(states)
            return drawn
        if self.kind == "seeding":
            torch.manual_seed(index)
            random.seed(index)
            return torch.rand(()).item()
        return 0.0


def noises(dataset: Any, plan: list[BatchIndices], seed: int = 1) -> dict[int, float]:
    fetcher = Fetcher(dataset, stack, seed)
    found = {}
    for slot in plan:
        given, batch = fetcher[slot]
        assert given is slot
        found |= dict(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))
    return found


def plan_of(layout: Layout, epoch: int = 0, position: int = 0, seed: int = 1) -> list[BatchIndices]:
    ranks = [layout._replace(reader=rank) for rank in range(layout.readers)]
    order = permutation(LENGTH, seed, epoch)
    return [slot for rank in ranks for slot in slots(order, epoch, position, rank)]


OWN = ["own", "own, made late", "own, with the epoch"]
KINDS = ["torch", "numpy", "random", "normal", "mixed", "some", "seeding", *OWN]


@settings(max_examples=25)
@given(
    st.sampled_from(KINDS),
    layouts(9, 3, 4, full=st.none() | st.integers(1, 4)),
    st.data(),
)
def test_a_samples_randomness_depends_on_seed_epoch_and_index_alone(
    kind: str, layout: Layout, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, LENGTH - 1))
    expected = noises(Drawing(kind), plan_of(Layout(LENGTH)))
    seed_generators(data.draw(st.integers(0, 99)))
    found = noises(Drawing(kind), plan_of(layout, position=position))
    assert found == {index: expected[index] for index in found}
    assert set(found) >= set(permutation(LENGTH, 1, 0)[position:].tolist())


@pytest.mark.parametrize("kind", ["torch", "numpy", "random", "normal", "mixed", *OWN])
def test_epoch_seed_and_index_each_change_it(kind: str) -> None:
    plan, next_plan = plan_of(Layout(5)), plan_of(Layout(5), epoch=1)
    first = noises(Drawing(kind), plan)
    assert len(set(first.values())) == LENGTH
    assert not set(first.values()) & set(noises(Drawing(kind), next_plan).values())
    assert not set(first.values()) & set(noises(Drawing(kind), plan, seed=2).values())


@pytest.mark.parametrize("kind", ["a state, read", "a state, restored"])
def test_what_a_dataset_makes_of_a_state_depends_on_the_batch_alone(kind: str) -> None:
    """Nothing shows that it has looked at the generators."""
    found = []
    for ambient in range(3):
        seed_generators(ambient)
        plan = plan_of(Layout(4))
        found.append(noises(Drawing(kind), plan if ambient < 2 else plan[::-1]))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) > 1
    assert noises(Drawing(kind), plan_of(Layout(4), epoch=1)) != found[0]


def test_a_dataset_that_seeds_by_its_index_is_seen_to_draw() -> None:
    class Seeding(Drawing):
        def noise(self, index: int) -> float:
            drawn = torch.rand(()).item()
            torch.manual_seed(index)
            return drawn

    first, second = (noises(Seeding("none"), plan_of(Layout(1), epoch=epoch)) for epoch in (0, 1))
    assert not set(first.values()) & set(second.values())
    assert noises(Seeding("none"), plan_of(Layout(1))[::-1]) == first


def test_what_comes_after_a_batch_draws_the_same_numbers_again() -> None:
    """A callback, for example: the state that reading leaves does not depend on the one before."""
    found = []
    for ambient in range(2):
        seed_generators(ambient)
        noises(Drawing("none"), plan_of(Layout(4))[:3])
        found.append((random.gauss(0, 1), np.random.standard_normal(), torch.randn(()).item()))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["none", "seeding"])
def test_samples_do_not_depend_on_the_batches_before(kind: str) -> None:
    plan = plan_of(Layout(4))
    assert noises(Drawing(kind), plan) == noises(Drawing(kind), plan[::-1])


def test_a_dataset_that_draws_nothing_is_read_once() -> None:
    dataset = Drawing("none")
    noises(dataset, plan_of(Layout(3)))
    assert dataset.reads == [1] * LENGTH


@pytest.mark.parametrize("batch", [1, 4, 8, LENGTH])
def test_a_dataset_that_draws_is_read_again_only_in_the_batch_where_that_shows(batch: int) -> None:
    """But never the first sample."""
    dataset = Drawing("some")
    plan = plan_of(Layout(batch))
    noises(dataset, plan)
    shows = next(slot for slot in plan if any(index % 7 == 3 for index in slot.indices))
    again = shows.indices[1:] if shows is plan[0] else shows.indices
    assert dataset.reads == [2 if index in again else 1 for index in range(LENGTH)]


@pytest.mark.parametrize("kind", ["torch", "numpy", "random", "normal", "mixed"])
def test_a_dataset_that_draws_for_each_sample_is_read_once(kind: str) -> None:
    """One that gives from a buffer would lose what is read in vain."""
    for epoch in (0, -1):
        dataset = Drawing(kind)
        noises(dataset, [slot._replace(epoch=epoch) for slot in plan_of(Layout(4))])
        again = 0 if epoch == 0 else 1  # an evaluation begins with the seed of sample 0, which is another one here
        assert sum(dataset.reads) == LENGTH + again


@pytest.mark.parametrize("kind", ["none", "torch", "own", "own, made late"])
def test_many_batches_of_an_evaluation_are_read_at_once_or_one_by_one(kind: str) -> None:
    (slot,) = plan_of(Layout(LENGTH))
    slots = [slot._replace(epoch=-1, indices=[index % LENGTH]) for index in range(1200)]
    fetcher = Fetcher(Drawing(kind), stack, 1)
    together = [(given, batch["noise"].tolist()) for given, batch in fetcher.several(slots)]
    alone = Fetcher(Drawing(kind), stack, 1)
    assert together == [(given, alone[given][1]["noise"].tolist()) for given in slots]


class Collator:
    """Draws from global generators, or from one that it makes for the first batch, as collators of transformers do."""

    def __init__(self, own: bool) -> None:
        self.own = own
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        if self.own:
            self.generator = self.generator or torch.Generator().manual_seed(3)
            mask = torch.rand(len(samples) + 1, generator=self.generator)
            return stack(samples) | {"mask": mask[1:], "shift": mask[0].item()}
        return stack(samples) | {"mask": torch.rand(len(samples)), "shift": random.random() + np.random.rand()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["none", "torch"])
def test_a_collator_may_draw_too(kind: str, own: bool) -> None:
    plan = plan_of(Layout(4))
    fetcher = Fetcher(Drawing(kind), Collator(own), 1)
    whole = [fetcher[slot][1] for slot in plan]
    again = Fetcher(Drawing(kind), Collator(own), 1)
    for slot, batch in list(zip(plan, whole, strict=True))[::-1]:  # as another worker, or a resume, would
        seed_generators(7)
        other = again[slot][1]
        assert torch.equal(other["mask"], batch["mask"])
        assert torch.equal(other["noise"], batch["noise"])
        assert other["shift"] == batch["shift"]
    assert len({batch["shift"] for batch in whole}) == len(whole)
    assert not any(torch.equal(batch["mask"], batch["noise"].float()) for batch in whole)


def test_noise_of_samples_is_not_that_of_steps() -> None:
    """The loop seeds a step with mix(seed, epoch, position): a sample with that index must not repeat its dropout."""
    found = noises(Drawing("torch"), plan_of(Layout(4)))
    for position in range(LENGTH):
        seed_generators(mix(1, 0, position))
        assert torch.rand(()).item() not in found.values()


@pytest.mark.parametrize(
    "error", [KeyError("x"), ValueError("bad row"), StopIteration(), IndexError("no"), RuntimeError("CRC")]
)
def test_a_dataset_that_raises_is_named_with_the_index(error: Exception) -> None:
    class Broken(Drawing):
        def noise(self, index: int) -> float:
            if index == 17:
                raise error
            return super().noise(index)

    for kind in ("none", "torch"):
        with pytest.raises(DataError, match=f"index 17: {type(error).__name__}") as caught:
            noises(Broken(kind), plan_of(Layout(4)))
        assert caught.value.__cause__ is error


def test_ctrl_c_is_not_taken_for_an_error_of_the_dataset() -> None:
    class Interrupted(Drawing):
        def noise(self, index: int) -> float:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noises(Interrupted("none"), plan_of(Layout(4)))


def test_the_dataset_is_told_of_each_epoch_once_and_of_no_evaluation() -> None:
    class Told(Drawing):
        epochs: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told("none")
    dataset.epochs = []
    noises(dataset, [*plan_of(Layout(8), 3), *plan_of(Layout(8), 4)])
    assert dataset.epochs == [3, 4]
    noises(dataset, list(evaluation_slots(LENGTH, Layout(8))))
    assert dataset.epochs == [3, 4]


class Table:
    """Reads many rows at once, as Hugging Face's datasets do."""

    def __init__(self, broken: int | None = None, noisy: bool = False) -> None:
        self.calls: list[Any] = []
        self.broken = broken
        self.noisy = noisy

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.calls.append(index)
        return self._row(index)

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        self.calls.append(list(indices))
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.broken:
            raise OSError("torn")
        return {"x": torch.full((2,), float(index)) + (torch.rand(2) if self.noisy else 0)}


def _slot(indices: list[int]) -> BatchIndices:
    return BatchIndices(0, 0, indices, True, 0, True, 0, len(indices), False)


def test_a_table_is_read_many_rows_at_once() -> None:
    table = Table()
    _, batch = Fetcher(table, stack, 0)[_slot([3, 1, 4])]
    assert table.calls == [[3, 1, 4]]
    assert batch["x"][:, 0].tolist() == [3.0, 1.0, 4.0]


def test_a_table_with_randomness_is_seeded_row_by_row() -> None:
    fetcher = Fetcher(Table(noisy=True), stack, 0)
    _, together = fetcher[_slot([3, 1, 4])]
    _, alone = Fetcher(Table(noisy=True), stack, 0)[_slot([1])]
    assert torch.equal(together["x"][1], alone["x"][0])


def test_the_broken_row_of_a_table_is_named() -> None:
    with pytest.raises(DataError, match="index 1: OSError: torn"):
        Fetcher(Table(broken=1), stack, 0)[_slot([3, 1, 4])]


def test_a_subclass_with_another_getitem_is_not_passed_by() -> None:
    class Doubled(Table):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": 2 * super().__getitem__(index)["x"]}

    _, batch = Fetcher(Doubled(), stack, 0)[_slot([3, 1, 4])]
    assert batch["x"][:, 0].tolist() == [6.0, 2.0, 8.0]


@pytest.mark.parametrize("draws", [False, True])
def test_an_error_by_chance_is_that_of_the_seeded_sample(draws: bool) -> None:
    class Broken(Drawing):
        def noise(self, index: int) -> float:
            if draws and random.random() < 0.1:
                raise ValueError(f"bad crop of {index}")
            return random.random()

    def outcome(before: int) -> str:
        seed_generators(before)
        try:
            return str(noises(Broken("none"), plan_of(Layout(20))))
        except DataError as error:
            return str(error)

    assert len({outcome(before) for before in range(10)}) == 1


@settings(max_examples=40)
@given(st.sampled_from([*KINDS[:-1], "a state, read", "a state, restored"]), st.integers(1, 9), st.data())
def test_batches_of_an_evaluation_that_are_read_together_are_those_of_single_readings(
    kind: str, size: int, data: st.DataObject
) -> None:
    plan = [*evaluation_slots(LENGTH, Layout(size))]
    alone, together = Fetcher(Drawing(kind), stack, 1), Fetcher(Drawing(kind), stack, 1)
    found, start = [together[plan[0]]], 1
    while start < len(plan):
        seed_generators(start)
        number = data.draw(st.integers(1, len(plan)))
        found += together.several(plan[start : start + number])
        start += number
    for (slot, batch), expected in zip(found, plan, strict=True):
        assert slot is expected
        assert batch["noise"].tolist() == alone[slot][1]["noise"].tolist()
        assert batch["index"].tolist() == slot.indices


def test_batches_that_draw_nothing_are_read_once() -> None:
    class Calls(Drawing):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.calls += 1
            return [self[index] for index in indices]

    dataset = Calls("none")
    fetcher, plan = Fetcher(dataset, stack, 1), [*evaluation_slots(LENGTH, Layout(4))]
    fetcher[plan[0]]
    assert len(fetcher.several(plan[1:])) == 9
    assert dataset.calls == 10  # which may depend on the batch
    assert dataset.reads == [1] * LENGTH

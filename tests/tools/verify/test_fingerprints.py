"""Fingerprints that differ where bits do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_kit.tools.verify.fingerprints import attributes, mark_of, marks, sample_marks, state_marks
from trainer_kit.utils.pytree import flatten_state


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.float16)),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        (torch.tensor([[0.0, 1.0]]).to_sparse(), torch.tensor([[1.0, 0.0]]).to_sparse()),
        (0.0, -0.0),
        (1, True),
        ("a" * 200, "a" * 201),
        (None, 0),
    ],
)
def test_marks_differ_where_bits_do(one: object, other: object) -> None:
    assert mark_of(one) != mark_of(other)
    assert mark_of(one) == mark_of(one)


def test_marks_of_a_tree_are_named_by_their_place() -> None:
    tree = {"a": [torch.zeros(2), {"b": 1.0}], "c": object()}
    assert [*marks(tree, "batch")] == ["batch.a.0", "batch.a.1.b"]
    view = torch.arange(6).reshape(2, 3).T
    assert mark_of(view) == mark_of(view.clone(memory_format=torch.contiguous_format))
    assert mark_of(torch.empty(0)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seen": {1, 2}}, {"seen": {1, 3}}),
        ({"at": Path("a")}, {"at": Path("b")}),
        ({"seen": [], "step": 1}, {"step": 1}),
        ({"seen": []}, {"seen": ()}),
        ({1: 2.0}, {"1": 2.0}),
        ({"a": {1: 0, "1": 1}}, {"a": {1: 1, "1": 0}}),
        ({"ema": {"w": torch.zeros(2)}}, {"ema": {"w": torch.ones(2)}}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2).numpy()}),
    ],
)
def test_marks_of_a_state_differ_where_a_checkpoint_does(one: object, other: object) -> None:
    assert state_marks(*flatten_state(one), "state") != state_marks(*flatten_state(other), "state")
    assert state_marks(*flatten_state(one), "state") == state_marks(*flatten_state(one), "state")


def test_marks_of_a_state_are_named_by_its_entries() -> None:
    found = state_marks(*flatten_state({"seen": 8, "w": torch.zeros(2)}), "callback EMA")
    assert found["callback EMA.seen"] == "8"
    assert found["callback EMA.w"].endswith(str(mark_of(torch.zeros(2))))


def test_samples_have_the_same_mark_wherever_they_stand() -> None:
    x, labels = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    found = sample_marks({"x": x, "labels": labels, "scale": torch.ones(())})
    assert sample_marks({"x": x.flip(0), "labels": labels.flip(0)}) == found[::-1]
    assert len({*found}) == 4
    assert sample_marks({"text": ["a"]}) == []


def test_attributes_leave_out_what_cannot_be_told() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.count = 0
            self.seen = [1, 2]
            self.many = [*range(10**4)]
            self.generator = torch.Generator().manual_seed(0)
            self.thing = object()

    counter = Counter()
    before = attributes(counter)
    assert {*before} == {"count", "seen", "many", "generator"}
    counter.count += 1
    counter.seen.append(3)
    torch.rand(1, generator=counter.generator)
    assert {name for name, mark in attributes(counter).items() if before[name] != mark} == {
        "count", "seen", "generator",
    }  # fmt: skip
    rate = 0.5
    assert attributes(lambda: rate) == {"rate": mark_of(0.5)}

"""The cause of a first difference."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from kit.forked import verified

from trainer_kit.tools.verify.cause import Evidence, find_cause
from trainer_kit.tools.verify.compare import Line, first_difference
from trainer_kit.tools.verify.report import describe

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="starts are forked, and killed by SIGKILL")


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("way", "resumed", "part", "cause", "told"),
    [
        ("order", False, "batch", "data order", "samples that the straight run had elsewhere"),
        ("stream noise", False, "batch", "dataset randomness", "train_dataset.noise is a generator"),
        ("clock", False, "batch", "dataset randomness", "read the clock"),
        ("global generator", True, "loss", "RNG", "the script's noise is a generator"),
        ("hidden generator", True, "loss", "RNG", "cannot be seen from outside"),
        ("unseeded generator", False, "loss", "RNG", "model.generator is a generator"),
        ("callback", True, "hyperparameters", "a callback or object without state", "callback Decay.factor has"),
        ("stops later", True, "end", "a callback or object without state", "callback Stop.left has"),
        ("wrong state", True, "states", "a state that does not come back", "callback Counts"),
        ("system", False, "loss", "nondeterministic kernel", "two uninterrupted runs differ as well"),
        ("clock state", False, "states", "a state that depends on the clock or the machine", "callback Counts differs"),
        ("weights", False, "model", "other weights at the beginning", "something else that is random"),
    ],
)
def test_a_cause_is_told(way: str, resumed: bool, part: str, cause: str, told: str) -> None:
    result = verified(way)
    difference = result.difference
    assert difference is not None
    assert result.cause is not None
    shown = describe(result, "again")
    assert (difference.part, result.cause.name) == (part, cause), shown
    assert told in result.cause.reason
    assert (result.resumed_from is not None) == resumed
    assert shown.startswith("diverged: ")
    if part in ("batch", "model"):  # tensors: both values were written down
        assert "elements, by at most" in result.amount


@pytest.mark.scenario
@pytest.mark.parametrize("way", ["generator", "counter"])
def test_generators_and_buffers_of_a_model_come_back(way: str) -> None:
    result = verified(way)
    assert result.difference is None, describe(result, "again")
    assert result.resumed_from is not None


@pytest.mark.parametrize(
    ("samples", "cause"),
    [
        ("aefg", "data order"),
        ("bacd", "data order"),
        ("bcde", "data order"),  # most are the step's own, at other places
        ("aebx", "data order"),
        ("axyz", "dataset randomness"),
        ("abcx", "dataset randomness"),
        ("exyz", "dataset randomness"),
        ("abcd", "dataset randomness"),  # what differs is no row of a sample, such as a mask
    ],
)
def test_samples_at_other_places_are_another_order(samples: str, cause: str) -> None:
    def step(number: int, marks: str) -> Line:
        return Line(
            number,
            {"ids": {"micro-batch 0": "0,1,2,3"}, "batch": {"micro-batch 0.x": marks}},
            {"samples": {str(place): mark for place, mark in enumerate(marks)}, "attributes": {}},
        )

    straight = {1: step(1, "abcd"), 2: step(2, "efgh")}
    found = {1: dataclasses.replace(step(1, samples), parts=step(1, samples + " collated").parts)}
    difference = first_difference(straight[1], found[1])
    assert difference is not None
    evidence = Evidence(difference, straight, straight, found, found, restored_at=None, is_reproducible=True)
    assert find_cause(evidence).name == cause


def test_a_buffer_that_no_checkpoint_holds_is_named() -> None:
    """One that only the first step sets, as a cache, from the batch."""

    def line(number: int, loss: str, calls: str) -> Line:
        parts = {"batch": {"x": "a"}, "unsaved": {"calls": calls}, "loss": {"loss": loss}}
        return Line(number, parts, {"samples": {}, "attributes": {}})

    straight = {1: line(1, "1", "first"), 2: line(2, "2", "first")}
    found = {1: line(1, "1", "none"), 2: line(2, "3", "second")}
    difference = first_difference(straight[2], found[2])
    assert difference is not None
    evidence = Evidence(difference, straight, straight, straight, found, restored_at=1, is_reproducible=True)
    cause = find_cause(evidence)
    assert cause.name == "an object without state"
    assert "the buffer calls of the model, which is not saved, has another value after the resume" in cause.reason

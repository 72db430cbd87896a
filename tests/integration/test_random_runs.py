"""Trainings of random settings: whatever stops them, they end as undisturbed ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.random_runs import make, outcome, random_run, stopped

QUICK, MORE = range(12), range(12, 40)


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_a_stopped_run_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    run, (whole, again) = random_run(seed), (tmp_path / "whole", tmp_path / "again")
    undisturbed = make(whole, run)
    undisturbed.train()
    torch.rand(seed)  # the resumed run does not begin in the same state
    stopped(again, run)
    resumed = make(again, run)
    resumed.train(resume_from_checkpoint=True)
    for ours, theirs in zip(outcome(resumed, again), outcome(undisturbed, whole), strict=True):
        assert _same(ours, theirs), f"{ours} != {theirs}"


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, (float, torch.Tensor)):
        pair = map(torch.as_tensor, (found, expected))
        return torch.allclose(*pair, rtol=0, atol=0, equal_nan=True)
    return bool(found == expected)

"""What a verification shows in a terminal; tests/tools/verify/test_cause.py shows those of real scripts."""

from __future__ import annotations

import dataclasses

import pytest

from trainer_kit.tools.verify.cause import Cause
from trainer_kit.tools.verify.compare import Difference
from trainer_kit.tools.verify.kill_plan import MOMENTS, Kill
from trainer_kit.tools.verify.report import describe
from trainer_kit.tools.verify.verification import Result

COUNTS = {"model": 1000, "unsaved": 234, "optimizer": 5, "states": 6}
EQUAL = Result(6, 6, Kill(4, next(iter(MOMENTS)), 0), 3, COUNTS)


def test_equal_bits_take_one_headline_and_the_command() -> None:
    lines = describe(EQUAL, "trainer-kit verify train.py").splitlines()
    assert lines[0] == "bitwise equal: 6 of 6 steps, killed and resumed"
    assert "(1,234 tensors), the optimizer (5 values)" in " ".join(" ".join(lines).split())
    assert lines[-1].split(maxsplit=1) == ["again", "trainer-kit verify train.py"]


@pytest.mark.parametrize(
    ("step", "is_restored", "resumed_from", "headline"),
    [
        (3, True, 3, "diverged: at the resume from checkpoint-3, before its first step"),
        (0, False, None, "diverged: before the first step"),
        (4, False, None, "diverged: in step 4, without a kill"),
        (5, False, 3, "diverged: in step 5, number 2 after the resume"),
    ],
)
def test_the_headline_says_where(step: int, is_restored: bool, resumed_from: int | None, headline: str) -> None:
    difference = Difference(step, "loss", "", "0.5 0x1p-1", "0.25 0x1p-2", 1, is_restored, rank=1)
    cause = Cause("RNG", "model.generator is a generator")
    text = describe(dataclasses.replace(EQUAL, difference=difference, resumed_from=resumed_from, cause=cause), "again")
    assert text.splitlines()[0] == headline
    shown = " ".join(text.split())
    assert "first loss is 0.25 instead of 0.5; 1 more of this kind differs (process 1)" in shown
    assert "likely RNG: model.generator is a generator" in shown

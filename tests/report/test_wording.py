from __future__ import annotations

import math

import pytest

from trainer_kit.report import wording


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 s"), (0.0345, "0.035 s"), (5.25, "5.2 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"),
        (61, "1 min 1 s"), (3599.6, "1 h"), (7260, "2 h 1 min"), (100_000, "27 h 47 min"), (172_799, "2 d"),
        (300_000, "3 d 11 h"), (math.nan, "nan"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_durations(seconds: float, told: str) -> None:
    assert wording.duration(seconds) == told


@pytest.mark.parametrize(
    ("gib", "told"),
    [(0, "0 KiB"), (1e-5, "10.5 KiB"), (0.35, "358 MiB"), (0.9999, "1,024 MiB"), (12.345, "12.3 GiB"),
     (2000, "1.95 TiB"), (math.nan, "nan GiB")],
)  # fmt: skip
def test_sizes(gib: float, told: str) -> None:
    assert wording.size(gib) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0"), (2.4e-4, "2.4e-4"), (5e-5, "5e-5"), (-3e-7, "-3e-7"), (0.25, "0.25"), (1500, "1.5k"), (2e7, "20M"),
     (3.456e12, "3.46T")],
)  # fmt: skip
def test_short_numbers(value: float, told: str) -> None:
    assert wording.short(value) == told


def test_other_words() -> None:
    assert [wording.percent(share) for share in (0.931, 0.39, 0.00077, 0)] == ["93.1 %", "39 %", "0.08 %", "0 %"]
    assert [wording.number(value) for value in (0.12345678, 12345.6, 7, True, "x", math.nan)] == [
        "0.1235", "12,346", "7", "True", "x", "nan",
    ]  # fmt: skip
    assert [wording.listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert wording.moment(math.nan) == "unknown"

"""Sizes, durations, numbers and lists of names as text."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.utils.units import (
    describe_shares,
    format_count,
    format_duration,
    format_number,
    format_si,
    format_size,
    join_names,
    parse_size,
    pluralize,
    size_unit,
)

SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}


@pytest.mark.parametrize(
    ("size", "count"),
    [(12, 12), ("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("1.5 kib", 1536), ("2GiB", 2**31), ("3tb", 3 * 10**12)],
)
def test_parse_size(size: int | str, count: int) -> None:
    assert parse_size(size) == count


@pytest.mark.parametrize("size", [0, -1, "0.0001KB", "7B", "5", "5G", "MB5", "1e3MB", ""])
def test_parse_size_refuses(size: int | str) -> None:
    with pytest.raises(ValueError, match="is not known; use a number of bytes or a string such as '5GB'"):
        parse_size(size)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**41, "2 TiB"), (-5e6, "-4.768 MiB"),
        (2**30 - 1, "1 GiB"), (1023.4 * 2**20, "1,023 MiB"), (math.nan, "nan B"),
    ],
)  # fmt: skip
def test_sizes(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(2**10, 2**49))
def test_a_size_is_read_back_to_four_digits(nbytes: int) -> None:
    assert parse_size(format_size(nbytes).replace(",", "")) == pytest.approx(nbytes, abs=5e-4 * nbytes + 1)


@given(st.floats(1, 2**67))
def test_a_size_is_below_1024_of_its_unit(nbytes: float) -> None:
    number, unit = format_size(nbytes).replace(",", "").split()
    assert 0.999 <= float(number) < 1024
    assert unit == size_unit(nbytes)[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0345, "0.035 s"), (5.25, "5.2 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"),
        (61, "1 min 1 s"), (3599.6, "1 h"), (7260, "2 h 1 min"), (100_000, "27 h 47 min"), (172_799, "2 d"),
        (300_000, "3 d 11 h"), (math.nan, "nan"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e9))
def test_a_duration_is_exact_to_its_smaller_unit(seconds: float) -> None:
    words = format_duration(seconds).split()
    numbers, units = [float(number.replace(",", "")) for number in words[::2]], words[1::2]
    total = sum(number * SECONDS[unit] for number, unit in zip(numbers, units, strict=True))
    assert total == pytest.approx(seconds, rel=0.06, abs=0.5 if seconds > 59 else 1e-300)
    assert len(units) == 1 or numbers[1] < SECONDS[units[0]] / SECONDS[units[1]]
    assert not any(unit in ("s", "min") and number >= 60 for number, unit in zip(numbers, units, strict=True))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.43214, "0.4321"), (5e-05, "5e-05"), (1234.56, "1,235"), (-1234.56, "-1,235"), (1.5e12, "1.5e+12"),
        (12.0, "12"), (1234567, "1,234,567"), (True, "True"), ("abc", "abc"), (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers(value: Any, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.4e-4, "2.4e-4"), (5e-5, "5e-5"), (-3e-7, "-3e-7"), (0.25, "0.25"), (1500, "1.5k"), (2e7, "20M"),
     (3.456e12, "3.46T"), (999_999, "1M"), (math.nan, "nan")],
)  # fmt: skip
def test_si_prefixes(value: float, text: str) -> None:
    assert format_si(value) == text


@pytest.mark.parametrize(("count", "text"), [(12, "12 FLOP"), (2.5e9, "2.5 GFLOP"), (3.456e21, "3.46 ZFLOP")])
def test_si_prefixes_of_a_unit(count: float, text: str) -> None:
    assert format_si(count, "FLOP") == text


@given(st.floats(1e-30, 9e23), st.integers(3, 6))
def test_an_si_number_is_read_back(value: float, digits: int) -> None:
    number, prefix = re.fullmatch(r"([\d.]+(?:e-\d+)?)([kMGTPEZ]?)", format_si(value, digits=digits)).groups()  # type: ignore[union-attr]
    assert float(number) * PREFIXES[prefix] == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert float(number) < 1000


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "step", "1 step"), (0, "step", "0 steps"), (2000, "step", "2,000 steps"), (0.5, "epoch", "0.5 epochs"),
        (1.0, "epoch", "1 epoch"), (2, "batch", "2 batches"), (2, "process", "2 processes"), (2, "crash", "2 crashes"),
        (2, "GPU", "2 GPUs"), (2, "other argument", "2 other arguments"),
    ],
)  # fmt: skip
def test_counts(number: float, noun: str, text: str) -> None:
    assert format_count(number, noun) == text
    assert text.endswith(f" {pluralize(noun, number)}")


@pytest.mark.parametrize(
    ("names", "text"),
    [("", ""), ("a", "a"), ((1, 2), "1 and 2"), ("abcd", "a, b, c and d"), ("abcde", "a, b, c and 2 more")],
)  # fmt: skip
def test_names(names: Any, text: str) -> None:
    assert join_names(iter(names)) == text


@given(st.integers(5, 5000))
def test_names_that_are_not_shown_are_counted(number: int) -> None:
    rest = re.fullmatch(r"0, 1, 2 and ([\d,]+) more", join_names(range(number)))
    assert rest is not None
    assert int(rest[1].replace(",", "")) == number - 3


def test_values_that_are_rare_stay_readable() -> None:
    assert format_duration(-100) == "-1 min 40 s"
    assert format_duration(1e12) == "11,574,074 d 2 h"
    assert [format_size(math.inf), format_size(math.nan)] == ["inf B", "nan B"]
    assert [format_si(math.inf, "FLOP"), format_si(1e24, "FLOP")] == ["inf FLOP", "1 YFLOP"]
    assert [format_count(0.99999, "epoch"), format_count(0.9, "epoch")] == ["1 epoch", "0.9 epochs"]
    assert join_names(["", "a"]) == " and a"
    assert join_names("abcdef", most=None) == "a, b, c, d, e and f"


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ([128, 128], "128"),
        ([171, 171, 170], "171, 171, 170"),
        ([1, 1, 0], "1, 1, 0"),
        ([17, 17, 16, 16, 16], "16 or 17"),
        ([2048] * 9, "2,048"),
    ],
)
def test_shares_are_listed_while_they_are_few(shares: list[int], text: str) -> None:
    assert describe_shares(shares) == text

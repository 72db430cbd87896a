from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from trainer_kit.config.field_types import Interval, Lengths, Numbers, Size, Steps
from trainer_kit.config.validation import check_values


@dataclasses.dataclass
class Fields:
    interval: Interval = "1:2"
    lengths: Lengths = dataclasses.field(default_factory=lambda: [1])
    numbers: Numbers = dataclasses.field(default_factory=dict)
    size: Size = 1
    steps: Steps = 1


@pytest.mark.parametrize(
    "values",
    [
        {"interval": "3:3"},
        {"lengths": [1, 8]},
        {"size": "5GB"},
        {"size": 1},
        {"steps": -1},
        {"steps": 7},
        {"numbers": {"a": 1}},
    ],
    ids=str,
)
def test_allowed(values: dict[str, Any]) -> None:
    fields = Fields(**values)
    check_values(fields)
    assert dataclasses.asdict(fields) | values == dataclasses.asdict(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("interval", value) for value in ("3:2", "0:2", "3")],
        *[("lengths", value) for value in ([], [0])],
        *[("size", value) for value in ("5 apples", 0)],
        *[("steps", value) for value in (0, -2)],
    ],
)
def test_not_allowed(field: str, value: Any) -> None:
    values: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field}=.* is not allowed; it must be "):
        check_values(Fields(**values))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"patience": 2, "mode": "max"}, ", not 'mode': 'max'; set greater_is_better instead"),
        ({"decay_type": "linear"}, ", not 'decay_type': 'linear'; leave it out, or give Trainer(lr_scheduler=)"),
        ({"power": math.nan}, ", not 'power': nan"),
        ({"power": True}, ", not 'power': True"),
        ({1: 2}, ", not 1: 2"),
    ],
)
def test_the_option_that_is_no_number_is_named(numbers: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^numbers=.* it must be a dict of finite numbers by name") as raised:
        check_values(Fields(numbers=numbers))
    assert str(raised.value).endswith(message)

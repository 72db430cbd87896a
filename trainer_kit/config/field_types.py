"""Types of the fields of `TrainingArguments`, with the rules that their values keep."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from trainer_kit.config.optimizer_options import parse_options
from trainer_kit.config.reporters import REPORTERS, TRACKER_NAMES, are_reporters
from trainer_kit.config.validation import Rule
from trainer_kit.utils.units import parse_size


def _is_interval_of_steps(value: float) -> bool:
    return 0 < value < 1 or (value >= 1 and value == int(value))


def _is_size(value: int | str) -> bool:
    try:
        return parse_size(value) > 0
    except ValueError:
        return False


def _is_interval(value: str) -> bool:
    match = re.fullmatch(r"(\d+):(\d+)", value)
    return match is not None and 1 <= int(match[1]) <= int(match[2])


def _is_named_number(name: Any, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(name, str) and is_number and math.isfinite(value)


_TEXT_OPTIONS = {
    "mode": "set greater_is_better instead",
    **dict.fromkeys(("threshold_mode", "warmup_type", "decay_type"), "leave it out, or give Trainer(lr_scheduler=)"),
}
"""What to do about text options that schedules of torch and transformers have."""


def _advise_on_numbers(options: dict[Any, Any]) -> str:
    name, value = next(pair for pair in options.items() if not _is_named_number(*pair))
    return f", not {name!r}: {value!r}" + (f"; {_TEXT_OPTIONS[name]}" if name in _TEXT_OPTIONS else "")


Count = Annotated[int, Rule("a whole number of at least 1", lambda value: value >= 1)]
CountOrZero = Annotated[int, Rule("a whole number of at least 0", lambda value: value >= 0)]
CountOrFraction = Annotated[
    int | float,
    Rule(
        "a whole number of at least 0, or a fraction below 1", lambda value: value == 0 or _is_interval_of_steps(value)
    ),
]
StepsOrFraction = Annotated[
    int | float, Rule("a whole number of at least 1, or a fraction of all steps below 1", _is_interval_of_steps)
]
Steps = Annotated[int, Rule("a whole number of at least 1, or -1 for no limit", lambda value: value == -1 or value > 0)]
Seed = Annotated[int, Rule("a whole number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)]
Positive = Annotated[float, Rule("a finite number above 0", lambda value: value > 0)]
NotNegative = Annotated[float, Rule("a finite number of at least 0", lambda value: value >= 0)]
NormLimit = Annotated[float, Rule("a finite number of at least 0; 0 sets no limit", lambda value: value >= 0)]
Beta = Annotated[float, Rule("a number of at least 0 and below 1", lambda value: 0 <= value < 1)]
Factor = Annotated[float, Rule("a number above 0 and at most 1", lambda value: 0 < value <= 1)]
Ratio = Annotated[float, Rule("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Folder = Annotated[str, Rule("the path of a folder", bool)]
Name = Annotated[str, Rule("a name that is not empty", bool)]
Names = Annotated[
    list[str], Rule("a list of different names", lambda value: all(value) and len(value) == len(set(value)))
]
MetricInputs = Annotated[
    list[str], Rule("a list of 'inputs' and 'loss'", lambda value: set(value) <= {"inputs", "loss"})
]
Lengths = Annotated[
    list[int], Rule("a list of whole numbers of at least 1", lambda value: bool(value) and min(value) >= 1)
]
Numbers = Annotated[
    dict[str, Any],
    Rule(
        "a dict of finite numbers by name",
        lambda value: all(map(_is_named_number, value, value.values())),
        _advise_on_numbers,
    ),
]
OptimizerOptions = Annotated[
    str, Rule("options as 'momentum=0.9,nesterov=true'", lambda value: parse_options(value) is not None)
]
Size = Annotated[int | str, Rule("a number of bytes of at least 1, or a string such as '5GB' or '200MiB'", _is_size)]
Interval = Annotated[str, Rule("the first and the last step, such as '10:20'", lambda value: _is_interval(value))]
Reporters = Annotated[
    str | list[Any],
    Rule(
        f"'all', 'none', or a list of {', '.join(map(repr, (*REPORTERS, *TRACKER_NAMES)))} and trackers of your own",
        are_reporters,
    ),
]
Artifacts = Annotated[
    list[str], Rule("a list of 'report', 'best' and 'last'", lambda value: set(value) <= {"report", "best", "last"})
]

"""The fields of records, from the lists in the docstrings of what makes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from site_builder.tables import code, table
from trainer_kit import callbacks
from trainer_kit.loop.evaluation import Evaluator
from trainer_kit.loop.step_metrics import StepMetrics
from trainer_kit.loop.summary import summarize
from trainer_kit.profiling.memberships import MembershipEntry

_FIELDS = re.compile(r"^- (`[^\n]+?`) \(([^)]+)\): (.+(?:\n  .+)*)", re.MULTILINE)


_WHERE = {"SlowProcesses": "In records of several processes, at least 100 steps apart"}
"""Where the fields of a callback are, if not in each record."""


class Field(NamedTuple):
    """A field of a record: its names, its unit and its meaning."""

    names: tuple[str, ...]
    unit: str
    meaning: str


def fields(thing: Any) -> list[Field]:
    """Return the fields that a docstring lists as `- `NAME` (UNIT): MEANING`."""
    found = _FIELDS.findall(inspect.getdoc(thing) or "")
    return [Field(tuple(re.findall("`(.+?)`", names)), unit, " ".join(text.split())) for names, unit, text in found]


def sources() -> Iterator[tuple[str, str, list[Field]]]:
    """Yield title, introduction and fields of each source of fields."""
    yield "Each record", "By the Trainer, whenever a record is due.", fields(StepMetrics.record)
    for name in callbacks.__all__:
        if found := fields(getattr(callbacks, name)):
            link = f"[`{name}`](callbacks.md#trainer_kit.callbacks.{name})"
            where = _WHERE.get(name, "In each record and in the metrics of the whole training")
            yield f"By {name}", f"{where}, by {link}.", found
    yield (
        "Evaluations and predictions",
        '`PREFIX` is "eval" for evaluations and "test" for predictions, and with a dict of datasets "eval_" and the '
        "name of the dataset. Callbacks get them in `on_evaluate` and `on_predict`.",
        fields(Evaluator.__call__),
    )
    yield (
        "Memberships",
        'In the "membership" lines of `log.jsonl`, which are written where other machines or processes train on than '
        "before: since machines were lost or came, or since the run resumed under another number of processes.",
        fields(MembershipEntry),
    )
    whole = "In `train().metrics` and for `on_train_end`, in addition to the callbacks' fields."
    yield "The whole training", whole, fields(summarize)


def records() -> str:
    """Return a table for each source of fields, and the events of `log.jsonl`."""
    parts = []
    for title, introduction, found in sources():
        rows = [[", ".join(map(code, field.names)), field.unit, field.meaning] for field in found]
        parts.append(f"## {title}\n\n{introduction}\n\n{table(['field', 'unit', 'meaning'], rows)}")
    events = inspect.getdoc(callbacks.JsonLines) or ""
    parts.append(f"## log.jsonl\n\n{events.partition(chr(10))[2].partition('Args:')[0].strip()}")
    return "\n\n".join(parts)

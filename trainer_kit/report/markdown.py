"""The report as Markdown, short enough for a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from trainer_kit.report import facts, wording
from trainer_kit.report.history import RunHistory
from trainer_kit.report.machine_band import MachineBand
from trainer_kit.report.panels import Panel, Series, Table, names_of, panels, thin
from trainer_kit.report.timeline import Timeline
from trainer_kit.utils.units import format_count, join_names

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 24
_ROWS = 50
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$@&!])")


def markdown(histories: Sequence[RunHistory]) -> str:
    """Return key figures, one-line curves, time, memory, evaluations, changed arguments and warnings.

    Args:
        histories: Histories of the runs, at least one.
    """
    names = names_of(histories)
    timelines = [Timeline(history) if Timeline.exists(history) else None for history in histories]
    parts = [f"## Training report: {escaped(join_names(names))}", _summary(histories, names, timelines)]
    parts += curves(histories)
    parts.append(_time(names, timelines))
    for name, history in zip(names, histories, strict=True):
        if MachineBand.exists(history):
            band = MachineBand(history)
            parts.append(section(_of(name, band.title, histories), band.table()))
    if any(facts.anatomy(history) for history in histories):
        parts.append(section(facts.ANATOMY_TITLE, facts.anatomy_table(histories)))
    if len(histories) == 1 and (table := facts.evaluations(histories[0], _ROWS)) is not None:
        parts.append(section("Evaluations", table))
    parts += [_arguments(histories, names), *_warnings(histories, names)]
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(text: str) -> str:
    """Escape Markdown and HTML in a text, and join its lines."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _of(name: str, text: str, histories: Sequence[RunHistory]) -> str:
    return text if len(histories) == 1 else f"{name}: {text}"


def section(title: str, table: Table) -> str:
    """Return a table under a heading, which says how many rows are left out."""
    some = f" ({len(table.body):,} of {table.of:,})" if len(table.body) < table.of else ""
    return f"### {escaped(title)}{some}\n\n{_table(table)}"


def _table(table: Table) -> str:
    head, *body = (f"| {' | '.join(map(escaped, row))} |" for row in (table.head, *table.body))
    return "\n".join([head, f"| --- |{' ---: |' * (len(table.head) - 1)}", *body])


def _summary(histories: Sequence[RunHistory], names: Sequence[str], timelines: Sequence[Timeline | None]) -> str:
    states = [facts.status(history) for history in histories]
    figures = [facts.key_figures(*pair) for pair in zip(histories, timelines, strict=True)]
    heads = list(dict.fromkeys(each.name for run in figures for each in run))
    columns = []
    for state, run in zip(states, figures, strict=True):
        by_name = {each.name: f"{each.value} ({each.note})" if each.note else each.value for each in run}
        status = f"{state.word}: {state.sentence}" if state.sentence else state.word
        columns.append([status, *(by_name.get(head, "-") for head in heads)])
    body = [[head, *cells] for head, *cells in zip(["Status", *heads], *columns, strict=True)]
    table = _table(Table(["", *names], body, len(body)))
    notices = [
        f"> {escaped(_of(name, notice, histories))}"
        for name, history in zip(names, histories, strict=True)
        for notice in facts.notices(history)
    ]
    return "\n\n".join([table, *notices])


def curves(histories: Sequence[RunHistory]) -> list[str]:
    """Return the section of one-line curves; empty if there is nothing to draw."""
    rows = [
        [panel.title if series.label == panel.title else f"{panel.title}: {series.label}", *_line(panel, series)]
        for panel in panels(histories)
        for series in panel.series
    ]
    table = Table(["Curve", "", "first", "last", "least", "greatest"], rows, len(rows))
    return [f"### Curves\n\n{_table(table)}"] if rows else []


def _line(panel: Panel, series: Series) -> list[str]:
    drawn = series.finite()
    if not len(drawn.values):
        return ["", *["-"] * 4]
    values = [drawn.values[0], drawn.values[-1], drawn.values.min(), drawn.values.max()]
    return [sparkline(drawn), *(panel.word(float(value)) for value in values)]


def sparkline(series: Series) -> str:
    """Return finite values as a line of at most 24 blocks: ▁ is the minimum and █ the maximum."""
    means = thin(series, _WIDTH).mean
    low, high = means.min(), means.max()
    heights = np.zeros(len(means)) if high == low else (means - low) / (high - low)
    return "".join(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in heights.tolist())


def _time(names: Sequence[str], timelines: Sequence[Timeline | None]) -> str:
    there = {name: each for name, each in zip(names, timelines, strict=True) if each is not None}
    if len(there) == 1:
        return section("Where the time went", next(iter(there.values())).table())
    activities = dict.fromkeys(name for each in there.values() for name in each.totals)
    rows = [
        [name, *(wording.percent(each.totals.get(name, 0.0) / each.wall) for each in there.values())]
        for name in activities
    ]
    return section("Where the time went", Table(["Activity", *there], rows, len(rows))) if there else ""


def _arguments(histories: Sequence[RunHistory], names: Sequence[str]) -> str:
    if len(histories) == 1:
        rows = [[name, value] for name, value, changed in facts.arguments(histories[0]) if changed]
        return section("Arguments that are not the default", Table(["", "Value"], rows, len(rows))) if rows else ""
    rows = [[name, *values] for name, values in facts.differing(histories)]
    return section("Arguments that differ", Table(["", *names], rows, len(rows))) if rows else ""


def _warnings(histories: Sequence[RunHistory], names: Sequence[str]) -> list[str]:
    lines = [
        f"- {escaped(_of(name, each.message, histories))} (step {each.step:,}, {format_count(each.times, 'time')})"
        for name, history in zip(names, histories, strict=True)
        for each in facts.warnings(history)
    ]
    return ["### Warnings\n\n" + "\n".join(lines)] if lines else []

"""The report as one self-contained HTML page, without network access or scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from trainer_kit._version import __version__
from trainer_kit.report import blocks, colours, drawing, facts, wording
from trainer_kit.report.history import RunHistory
from trainer_kit.report.machine_band import MachineBand
from trainer_kit.report.markup import Markup, element, joined
from trainer_kit.report.panels import Table, names_of, panels
from trainer_kit.report.timeline import Timeline
from trainer_kit.utils.units import format_count, join_names

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Section(NamedTuple):
    """A section of the page: its key in links, its title and its content."""

    key: str
    title: str
    content: Markup


class _Runs(NamedTuple):
    """The runs of a report, with their distinct names and their timelines, if any."""

    histories: Sequence[RunHistory]
    names: Sequence[str]
    timelines: Sequence[Timeline | None]

    @property
    def is_one(self) -> bool:
        return len(self.histories) == 1


def page(histories: Sequence[RunHistory]) -> str:
    """Return the page of one run, or of several in comparison.

    Args:
        histories: Histories of the runs, at least one.
    """
    timelines = [Timeline(history) if Timeline.exists(history) else None for history in histories]
    runs = _Runs(histories, names_of(histories), timelines)
    makers = (_summary, _curves, _time, _anatomy, _evaluations, _warnings, _arguments, _environment)
    with drawing.settings():
        sections = [section for make in makers if (section := make(runs)) is not None]
    links = [element("li", element("a", each.title, href=f"#{each.key}")) for each in sections]
    body = element(
        "body",
        element("a", "Skip to the report", href="#report", class_="skip"),
        _header(runs),
        element("nav", element("ul", *links), aria_label="Sections"),
        element("main", *(_section(each) for each in sections), id="report", tabindex="-1"),
        _footer(runs),
    )
    return "<!DOCTYPE html>\n" + element("html", _head(join_names(runs.names)), body, lang="en") + "\n"


def _head(title: str) -> Markup:
    sheet = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title}: training report"),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(colours.variables() + sheet)),
    )


def _header(runs: _Runs) -> Markup:
    if not runs.is_one:
        kind = f"Training report of {len(runs.names)} runs"
        return element("header", element("p", kind, class_="kind"), element("h1", join_names(runs.names)))
    (history,) = runs.histories
    state = facts.status(history)
    return element(
        "header",
        element("p", "Training report", class_="kind"),
        element("h1", runs.names[0], " ", _badge(state)),
        element("p", f"Started {wording.moment(history.starts[0].time)}", class_="when") if history.starts else "",
        element("p", state.sentence, class_=f"told {state.kind}") if state.sentence else "",
    )


def _badge(state: facts.Status) -> Markup:
    return element("span", state.word, class_=f"badge {state.kind}")


def _footer(runs: _Runs) -> Markup:
    records = format_count(sum(history.count for history in runs.histories), "record")
    made = f"Made {wording.moment(time.time())} by trainer_kit {__version__} from {records} of "
    paths = [element("code", str(history.path)) for history in runs.histories]
    return element("footer", element("p", made, *(joined([path, " "]) for path in paths)))


def _section(section: Section) -> Markup:
    heading = element("h2", section.title, id=f"{section.key}-title")
    return element("section", heading, section.content, id=section.key, aria_labelledby=f"{section.key}-title")


def _summary(runs: _Runs) -> Section:
    figures = [facts.key_figures(*pair) for pair in zip(runs.histories, runs.timelines, strict=True)]
    notices = [
        element("p", notice if runs.is_one else f"{name}: {notice}", class_="notice")
        for name, history in zip(runs.names, runs.histories, strict=True)
        for notice in facts.notices(history)
    ]
    if not runs.is_one:
        return Section("summary", "Summary", joined([_compared(runs, figures), *notices]))
    tiles = [element("div", element("dt", each.name), element("dd", _figure(each))) for each in figures[0]]
    return Section("summary", "Summary", joined([element("dl", *tiles, class_="tiles"), *notices]))


def _figure(figure: facts.Figure | None) -> Markup:
    if figure is None:
        return Markup("-")
    return joined([figure.value, element("small", figure.note) if figure.note else ""])


def _compared(runs: _Runs, figures: Sequence[Sequence[facts.Figure]]) -> Markup:
    """Return a table of key figures, with one column per run."""
    by_name = [{each.name: each for each in run} for run in figures]
    names = dict.fromkeys(each.name for run in figures for each in run)
    rows = [[name, *(_figure(run.get(name)) for run in by_name)] for name in names]
    rows.insert(0, ["Status", *(_badge(facts.status(history)) for history in runs.histories)])
    return blocks.table(Table(["", *runs.names], rows, len(rows)), "Key figures of the runs")


def _curves(runs: _Runs) -> Section | None:
    found = panels(runs.histories)
    figures = [blocks.curves(panel, f"curve-{number}", wide=number == 0) for number, panel in enumerate(found)]
    return Section("curves", "Curves", element("div", *figures, class_="grid")) if figures else None


def _time(runs: _Runs) -> Section | None:
    figures = [
        blocks.timeline(each, f"time-{number}", "Share of the wall time" if runs.is_one else name)
        for number, (name, each) in enumerate(zip(runs.names, runs.timelines, strict=True))
        if each is not None
    ]
    for number, (name, history) in enumerate(zip(runs.names, runs.histories, strict=True)):
        if MachineBand.exists(history):
            band = MachineBand(history)
            title = band.title if runs.is_one else f"{name}: {band.title.lower()}"
            figures.append(blocks.machines(band, f"machines-{number}", title))
    return Section("time", "Where the time went", element("div", *figures, class_="grid")) if figures else None


def _anatomy(runs: _Runs) -> Section | None:
    parts = [facts.anatomy(history) for history in runs.histories]
    if not any(parts):
        return None
    rows = {"" if runs.is_one else name: part for name, part in zip(runs.names, parts, strict=True) if part}
    figure = blocks.bars(rows, "anatomy", facts.ANATOMY_TITLE, facts.anatomy_table(runs.histories))
    return Section("memory", "Where the memory went", element("div", figure, class_="grid"))


def _evaluations(runs: _Runs) -> Section | None:
    tables = [
        (name, table)
        for name, history in zip(runs.names, runs.histories, strict=True)
        if (table := facts.evaluations(history)) is not None
    ]
    if not tables:
        return None
    if runs.is_one:
        return Section("evaluations", "Evaluations", blocks.table(tables[0][1], "Evaluations"))
    found = [blocks.details(name, blocks.table(table, f"Evaluations of {name}")) for name, table in tables]
    return Section("evaluations", "Evaluations", joined(found))


def _warnings(runs: _Runs) -> Section | None:
    items = []
    for name, history in zip(runs.names, runs.histories, strict=True):
        for each in facts.warnings(history):
            where = f"{each.source}, step {each.step:,}" if each.source else f"step {each.step:,}"
            times = f", {format_count(each.times, 'time')}" if each.times > 1 else ""
            run = "" if runs.is_one else f"{name}, "
            items.append(element("li", element("p", each.message), element("small", f"{run}{where}{times}")))
    return Section("warnings", "Warnings", element("ul", *items, class_="warnings")) if items else None


def _arguments(runs: _Runs) -> Section | None:
    if not runs.is_one:
        rows = [[name, *values] for name, values in facts.differing(runs.histories)]
        if not rows:
            return Section("arguments", "Arguments", element("p", "All arguments are the same."))
        table = Table(["Argument", *runs.names], rows, len(rows))
        return Section("arguments", "Arguments that differ", blocks.table(table, "Arguments that differ"))
    rows = [[name, value] for name, value, changed in facts.arguments(runs.histories[0]) if changed]
    usual = [[name, value] for name, value, changed in facts.arguments(runs.histories[0]) if not changed]
    if not rows and not usual:
        return None
    head = ["Argument", "Value"]
    parts = [blocks.table(Table(head, rows, len(rows)), "Arguments that are not the default")] if rows else []
    if usual:
        noun = format_count(len(usual), "other argument" if rows else "argument")
        parts.append(
            blocks.details(f"{noun} with the default value", blocks.table(Table(head, usual, len(usual)), "Defaults"))
        )
    return Section("arguments", "Arguments", joined(parts))


def _environment(runs: _Runs) -> Section | None:
    environments = [dict(facts.environment(history)) for history in runs.histories]
    names = list(dict.fromkeys(name for each in environments for name in each))
    rows = [[name, *(each.get(name, "-") for each in environments)] for name in names]
    head = ["", *(["Value"] if runs.is_one else runs.names)]
    return Section("environment", "Environment", blocks.table(Table(head, rows, len(rows)), "Environment"))

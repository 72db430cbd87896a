"""Building blocks of a report's page: plots with their legends, and tables that fit a narrow screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_kit.report import drawing, facts, wording
from trainer_kit.report.colours import DASHES, bar_role, role_of
from trainer_kit.report.machine_band import MISSING, MachineBand
from trainer_kit.report.markup import Markup, element, joined, text
from trainer_kit.report.panels import Panel, Series, Table
from trainer_kit.report.timeline import Timeline

_STACKED_FROM = 4
"""Number of columns from which a narrow screen shows each row of a table as a block."""


def curves(panel: Panel, name: str, wide: bool = False) -> Markup:
    """Return a panel with its legend and table.

    Args:
        panel: Panel to draw.
        name: Prefix of the identifiers in the plot, unique in the page.
        wide: Whether the plot takes the whole page on a wide screen.
    """
    drawn = _drawn(lambda name, size: drawing.curves(panel, name, size), name, wide)
    legend = [_entry(line(each.style), each.label, _last(panel, each)) for each in panel.series]
    if len(legend) == 1 and panel.series[0].style == 0:
        legend = [_entry(Markup(), "last", _last(panel, panel.series[0]))]
    legend += [
        _entry(Markup('<span aria-hidden="true">★</span>'), "best", _best(panel, each))
        for each in panel.series
        if each.best is not None
    ]
    table = panel.table()
    return _figure(panel.title, legend, drawn, panel.notes(drawing.columns(drawing.NARROW)), table, wide)


def timeline(each: Timeline, name: str, title: str) -> Markup:
    """Return the timeline of a run with its legend, and a table of its totals.

    Args:
        each: The timeline.
        name: Prefix of the identifiers in the plot, unique in the page.
        title: Title of the plot.
    """
    drawn = _drawn(lambda name, size: drawing.timeline(each, name, size), name, wide=True)
    shown = each.shown_totals()
    legend = [
        _entry(area(role_of(name)), name, wording.percent(share) if share else "") for name, share in shown.items()
    ]
    marks = sorted({mark.kind for mark in each.marks}, reverse=True)
    legend += [_entry(Markup(f'<span aria-hidden="true">{_MARKS[kind]}</span>'), kind, "") for kind in marks]
    return _figure(title, legend, drawn, "", each.table(), wide=True)


def machines(band: MachineBand, name: str, title: str) -> Markup:
    """Return the machines of a run over time with their legend, and a table of their changes.

    Args:
        band: The machines.
        name: Prefix of the identifiers in the plot, unique in the page.
        title: Title of the plot.
    """
    drawn = _drawn(lambda name, size: drawing.machines(band, name, size), name, wide=True)
    shares = {MISSING: wording.percent(band.missing)}
    legend = [_entry(area(role_of(kind)), kind, shares.get(kind, "")) for kind in band.kinds]
    return _figure(title, legend, drawn, "Dashed lines mark changes.", band.table(), wide=True)


_MARKS = {"restart": "▼", "rollback": "◀"}


def bars(rows: dict[str, dict[str, float]], name: str, title: str, table: Table) -> Markup:
    """Return stacked bars of GiB with their legend and table.

    Args:
        rows: GiB by component for each bar, by the bar's label.
        name: Prefix of the identifiers in the plot, unique in the page.
        title: Title of the plot.
        table: The same figures as text.
    """
    names = list(dict.fromkeys(each for row in rows.values() for each in row))
    only = next(iter(rows.values())) if len(rows) == 1 else {}
    legend = [
        _entry(area(bar_role(names, each)), each, wording.size(only[each]) if each in only else "") for each in names
    ]
    said = "; ".join(
        f"{label or title}: {', '.join(f'{each} {wording.size(gib)}' for each, gib in row.items())}, together "
        f"{wording.size(sum(row.values()))}"
        for label, row in rows.items()
    )
    drawn = _drawn(lambda name, size: drawing.bars(rows, name, f"{said}.", size), name, wide=True)
    note = facts.ANATOMY_NOTE if "activations" in names else ""
    return _figure(title, legend, drawn, note, table, wide=True)


def line(style: int) -> Markup:
    """Return a sample of a line style."""
    dashes = " ".join(f"{1.7 * length:g}" for length in DASHES[style])
    return Markup(
        f'<svg class="sample" viewBox="0 0 24 8" aria-hidden="true"><path d="M1 4H23" fill="none" stroke-width="2.4" '
        f'style="stroke:var(--line-{style})"{f""" stroke-dasharray="{dashes}" """ if dashes else ""}/></svg>'
    )


def area(role: str) -> Markup:
    """Return a sample of an area's colour."""
    hatched = " hatched" if role in drawing.HATCHED else ""
    return Markup(f'<span class="area{hatched}" style="background-color:var(--{role})" aria-hidden="true"></span>')


def table(content: Table, caption: str, hidden_caption: bool = True) -> Markup:
    """Return a table whose first column names the rows.

    Args:
        content: Texts of the table.
        caption: Caption; it reports omitted rows.
        hidden_caption: Whether only screen readers get the caption; it is always shown if rows are omitted.
    """
    if len(content.body) < content.of:
        caption, hidden_caption = f"{caption}: {len(content.body):,} of {content.of:,}", False
    stacked = len(content.head) >= _STACKED_FROM
    rows = [_row(content.head, row, stacked) for row in content.body]
    heads = [element("th", _breakable(each), scope="col", role=_role("columnheader", stacked)) for each in content.head]
    return element(
        "table",
        element("caption", caption, class_="hidden" if hidden_caption else None),
        element("thead", element("tr", *heads, role=_role("row", stacked)), role=_role("rowgroup", stacked)),
        element("tbody", *rows, role=_role("rowgroup", stacked)),
        class_="stacked" if stacked else None,
        role=_role("table", stacked),
    )


def _row(names: Sequence[str], cells: Sequence[str], stacked: bool) -> Markup:
    first = element(
        "th", cells[0], scope="row", data_name=names[0] if stacked else None, role=_role("rowheader", stacked)
    )
    if not stacked:
        return element("tr", first, *(element("td", cell) for cell in cells[1:]))
    rest = [
        element("td", element("span", cell), data_name=name, role="cell")
        for name, cell in zip(names[1:], cells[1:], strict=True)
    ]
    return element("tr", first, *rest, role="row")


def _role(role: str, stacked: bool) -> str | None:
    """Return the role for screen readers, needed where the style sheet turns the table into blocks."""
    return role if stacked else None


def _breakable(name: str) -> Markup:
    """Return a name that may wrap after each underscore."""
    return Markup("_<wbr>".join(text(part) for part in name.split("_")))


def details(summary: str, *content: str) -> Markup:
    """Return a collapsed block with a summary."""
    return element("details", element("summary", summary), *content)


def _figure(title: str, legend: Sequence[str], drawn: Markup, note: str, content: Table, wide: bool) -> Markup:
    return element(
        "figure",
        element("figcaption", element("h3", title), element("ul", *legend, class_="legend")),
        drawn,
        element("p", note, class_="note") if note else "",
        details(f"Table: {title}", table(content, title)),
        class_="wide" if wide else None,
    )


def _drawn(draw: Callable[[str, tuple[int, int]], str], name: str, wide: bool) -> Markup:
    """Return the plot; a wide one in two sizes, of which the style sheet shows the fitting one."""
    narrow = Markup(draw(name, drawing.NARROW))
    if not wide:
        return narrow
    broad = Markup(draw(f"{name}-wide", drawing.WIDE))
    return joined([element("div", broad, class_="broad"), element("div", narrow, class_="narrow")])


def _entry(sample: Markup, label: str, value: str) -> Markup:
    return element("li", sample, element("span", label), element("b", value) if value else "")


def _last(panel: Panel, series: Series) -> str:
    return panel.word(float(series.values[-1]))


def _best(panel: Panel, series: Series) -> str:
    value = float(series.values[series.steps == series.best][0])
    return f"{panel.word(value)} at step {series.best:,}"

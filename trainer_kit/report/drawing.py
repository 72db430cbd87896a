"""Plots by matplotlib: as SVG for the page, with colours from its style sheet, and as one picture."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer_kit.report import facts, wording
from trainer_kit.report.colours import DASHES, LIGHT, bar_role, role_of
from trainer_kit.report.history import RunHistory
from trainer_kit.report.machine_band import MISSING, STILL, TRAINING, MachineBand
from trainer_kit.report.markup import printable, text
from trainer_kit.report.panels import Panel, Series, names_of, panels, thin
from trainer_kit.report.timeline import Timeline
from trainer_kit.utils.units import GIB, format_si, join_names, size_unit

try:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator, LogLocator, MaxNLocator
    from matplotlib.transforms import ScaledTranslation
except ImportError as error:
    raise ImportError(f"a report needs matplotlib ({error}): pip install matplotlib") from error

Axes = Any
_Scale = tuple[Locator, Callable[[float], str]]  # positions and labels of its ticks

_CROSSES = 50
_AWAY = 6 / 72  # inches between a plot and its labels

HATCHED = ("lost", "down", MISSING, STILL)
"""Activities and times without a lasting result."""

NARROW, WIDE = (420, 236), (860, 260)
"""Width and height of a plot in CSS pixels: in one column or on a phone, and over the whole page."""

_ROLES = list(LIGHT)
_TOKENS = {role: f"#fe{number:02x}ef" for number, role in enumerate(_ROLES)}
_TOKEN = re.compile(r"#fe([0-9a-f]{2})ef", re.IGNORECASE)

_REFERENCE = re.compile(r'(?:url\(|href=")#([\w.-]+)')
_IDENTIFIER = re.compile(r' id="([^"]*)"')
_PATH = re.compile(r' d="[^"]*"')
_LONG = re.compile(r"(?<=\.\d)\d+")
_FONT = re.compile(r"font: (?:(\d+) )?([\d.]+px) 'DejaVu Sans'")  # how older releases of matplotlib write one
_SUPERFLUOUS = re.compile(r"\s*<g ?/>|; font-family: 'DejaVu Sans'| transform=\"rotate\(-0[^\"]*\"|\n *")

_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trainer_kit",
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "text.usetex": False,
    "axes.unicode_minus": True,
    "path.simplify": True,
    "hatch.linewidth": 0.8,
    "lines.solid_capstyle": "round",
}


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Enter the context of a report's matplotlib settings, independent of the user's."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing from (current )?font"
        )  # in a run's name; a browser has more fonts
        matplotlib.rcdefaults()
        with matplotlib.rc_context(_SETTINGS):
            yield


def curves(panel: Panel, name: str, size: tuple[int, int] = NARROW) -> str:
    """Return a panel as SVG, without title and legend.

    Args:
        panel: Panel to draw.
        name: Prefix of the identifiers in the SVG.
        size: Width and height in CSS pixels.
    """
    axes = _axes(size)
    draw_curves(axes, panel, _TOKENS, columns(size))
    return _svg(axes.figure, name, panel.description())


def columns(size: tuple[int, int]) -> int:
    """Return the number of columns that a plot's steps are divided into."""
    return size[0] // 2


def timeline(each: Timeline, name: str, size: tuple[int, int] = WIDE) -> str:
    """Return the shares of the activities over the wall-clock time as SVG.

    Args:
        each: The timeline.
        name: Prefix of the identifiers in the SVG.
        size: Width and height in CSS pixels.
    """
    axes = _axes(size)
    draw_timeline(axes, each, _TOKENS, size[0] // 4)
    return _svg(axes.figure, name, each.description())


def machines(band: MachineBand, name: str, size: tuple[int, int] = WIDE) -> str:
    """Return the machines over the wall-clock time as SVG.

    Args:
        band: The machines.
        name: Prefix of the identifiers in the SVG.
        size: Width and height in CSS pixels.
    """
    axes = _axes((size[0], 150))
    draw_machines(axes, band, _TOKENS)
    return _svg(axes.figure, name, band.description())


def bars(rows: dict[str, dict[str, float]], name: str, label: str, size: tuple[int, int] = WIDE) -> str:
    """Return stacked bars as SVG, one per row with its name above it.

    Args:
        rows: GiB by component for each bar, by the bar's name.
        name: Prefix of the identifiers in the SVG.
        label: Text alternative.
        size: Width and height in CSS pixels; the height is ignored, since it follows from the number of bars.
    """
    axes = _axes((size[0], 46 + 44 * len(rows)), left=12)
    draw_bars(axes, rows, _TOKENS)
    return _svg(axes.figure, name, label)


def picture(histories: Sequence[RunHistory], path: Path) -> None:
    """Write all plots to one PNG file, at 200 dots per inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with settings():
        figure = _picture(histories)
        FigureCanvasAgg(figure).print_figure(path, dpi=200, format="png", metadata={"Software": "trainer_kit"})


def _picture(histories: Sequence[RunHistory]) -> Figure:
    names = names_of(histories)
    found = panels(histories)
    timelines = [
        (f"Where the time of {name} went" if len(names) > 1 else "Where the time went", Timeline(history))
        for name, history in zip(names, histories, strict=True)
        if Timeline.exists(history)
    ]
    bands = [
        (f"{band.title} of {name}" if len(names) > 1 else band.title, band)
        for name, band in (
            (name, MachineBand(each)) for name, each in zip(names, histories, strict=True) if MachineBand.exists(each)
        )
    ]
    parts = [facts.anatomy(history) for history in histories]
    bars = {"" if len(names) == 1 else name: part for name, part in zip(names, parts, strict=True) if part}
    count = max(1, len(found) + len(timelines) + len(bands) + bool(bars))
    columns = min(count, 3 if count > 4 else 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.4), layout="constrained", facecolor=LIGHT["page"])
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    figure.suptitle(printable(join_names(names)), fontsize=14, color=LIGHT["text"], fontweight="bold")
    grid = iter(figure.subplots(rows, columns, squeeze=False).ravel())
    for panel in found:
        axes = _plain(next(grid))
        draw_curves(axes, panel, LIGHT, 400)
        _entitle(axes, panel.title, legend=len(panel.series) > 1)
    for title, timeline in timelines:
        axes = _plain(next(grid))
        draw_timeline(axes, timeline, LIGHT, 140)
        _entitle(axes, title, legend=True, columns=3, pad=16)
    for title, band in bands:
        axes = _plain(next(grid))
        draw_machines(axes, band, LIGHT)
        _entitle(axes, title, legend=True, columns=3)
    if bars:
        axes = _plain(next(grid))
        draw_bars(axes, bars, LIGHT)
        _entitle(axes, facts.ANATOMY_TITLE, legend=True)
    for axes in grid:
        axes.set_axis_off()
    return figure


def draw_curves(axes: Axes, panel: Panel, colours: dict[str, str], columns: int) -> None:
    """Draw the lines of a panel; many values are drawn as mean and range per column of pixels.

    Args:
        axes: Empty axes.
        panel: Panel to draw.
        colours: Colours by role.
        columns: Width of the plot in columns of pixels.
    """
    if panel.is_logarithmic:
        axes.set_yscale("log")
    factor = _factor(panel)
    for series in panel.series:
        drawn = series.finite()
        colour, dashes = colours[f"line-{series.style}"], DASHES[series.style]
        thinned = thin(drawn, columns)
        if len(thinned.steps) < len(drawn.steps):
            axes.fill_between(
                thinned.steps, thinned.low * factor, thinned.high * factor, color=colour, alpha=0.22, linewidth=0
            )
        few = len(drawn.steps) == 1 or (series.sparse and len(drawn.steps) <= columns // 8)
        axes.plot(
            thinned.steps, thinned.mean * factor, color=colour, linestyle=(0, dashes) if dashes else "solid",
            linewidth=1.7, marker="o" if few else "", markersize=4.5, label=printable(series.label),
        )  # fmt: skip
        _mark_missing(axes, series, colour)
        if series.best is not None:
            height = float(series.values[series.steps == series.best][0]) * factor
            axes.plot(
                [series.best], [height], "*", color=colour, markersize=16, markeredgecolor=colours["page"],
                zorder=3, clip_on=False,
            )  # fmt: skip
    _scale(axes, panel, colours)


def _mark_missing(axes: Axes, series: Series, colour: str) -> None:
    """Draw crosses at the bottom of the plot, at the first values that are not finite."""
    bad = series.steps[~np.isfinite(series.values)][:_CROSSES]
    if len(bad):
        axes.plot(bad, [0.02] * len(bad), "x", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)


def _scale(axes: Axes, panel: Panel, colours: dict[str, str]) -> None:
    if panel.from_zero:
        axes.set_ylim(0, axes.get_ylim()[1] or 1.0)
    up = LogLocator(10, numticks=6) if panel.is_logarithmic else _ticks(5)
    is_empty = not any(len(series.finite().steps) for series in panel.series)
    _rule(axes, colours, (_ticks(5, integer=True), _short), None if is_empty else (up, _writer(panel)), "step")


def _rule(axes: Axes, colours: dict[str, str], across: _Scale, up: _Scale | None, label: str) -> None:
    """Draw scales around the existing plot (matplotlib's own are slower than everything else)."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    beneath = axes.get_xaxis_transform() + ScaledTranslation(0, -_AWAY, axes.figure.dpi_scale_trans)
    beside = axes.get_yaxis_transform() + ScaledTranslation(-_AWAY, 0, axes.figure.dpi_scale_trans)
    words = {"color": colours["text"], "clip_on": False}
    for value, written in _written(across, left, right):
        axes.text(value, 0, written, transform=beneath, ha="center", va="top", **words)
    if up is not None:
        heights = _written(up, low, high)
        for value, written in heights:
            axes.text(0, value, written, transform=beside, ha="right", va="center", **words)
        levels = [value for value, _ in heights]
        axes.hlines(levels, 0, 1, transform=axes.get_yaxis_transform(), color=colours["faint"], zorder=0.5, linewidth=1)
    foot = axes.transAxes + ScaledTranslation(0, -3.6 * _AWAY, axes.figure.dpi_scale_trans)
    axes.text(1, 0, label, transform=foot, ha="right", va="top", **words)
    axes.plot([0, 1], [0, 0], transform=axes.transAxes, color=colours["axis"], linewidth=1, clip_on=False)


def _written(scale: _Scale, low: float, high: float) -> list[tuple[float, str]]:
    locator, write = scale
    ticks = np.asarray(locator.tick_values(low, high))
    return [(value, write(value)) for value in ticks[(low <= ticks) & (ticks <= high)].tolist()]


def _factor(panel: Panel) -> float:
    """Return the factor for values that makes the ticks of the vertical axis round: sizes are in GiB."""
    return GIB / size_unit(_greatest(panel) * GIB)[0] if panel.word is wording.size else 1.0


def _writer(panel: Panel) -> Callable[[float], str]:
    """Return the formatter of the vertical axis: sizes in one unit, shares in percent."""
    if panel.word is wording.size:
        _, unit = size_unit(_greatest(panel) * GIB)
        return lambda value: f"{value:,.4g} {unit}" if value else "0"
    return wording.percent if panel.word is wording.percent else _short


def _short(value: float) -> str:
    """Format a tick with all its digits, which are few."""
    return format_si(value, digits=6)


def _greatest(panel: Panel) -> float:
    return max((float(series.finite().values.max(initial=0.0)) for series in panel.series), default=0.0)


def draw_timeline(axes: Axes, each: Timeline, colours: dict[str, str], columns: int) -> None:
    """Draw stacked shares of the activities over time, with a line at each restart and rollback.

    Args:
        axes: Empty axes.
        each: The timeline.
        colours: Colours by role.
        columns: Number of equal parts of the time.
    """
    edges, shares = each.shares(columns)
    factor, unit = _time_unit(each.length)
    edges = edges * factor
    below = edges[:-1] * 0
    for name, share in shares.items():
        role = role_of(name)
        hatched = name in HATCHED
        axes.fill_between(
            edges, [*below, below[-1]], [*(below + share), below[-1] + share[-1]], step="post",
            facecolor=colours[role], edgecolor=colours["hatch"] if hatched else "none", hatch="///" * hatched,
            linewidth=0, label=name,
        )  # fmt: skip
        below = below + share
    for number, mark in enumerate(each.marks):
        is_first = mark.kind not in {other.kind for other in each.marks[:number]}
        axes.axvline(mark.second * factor, color=colours["text"], linewidth=1.2, linestyle=(0, (3, 2)))
        axes.plot(
            [mark.second * factor], [1.03], marker="v" if mark.kind == "restart" else "<", markersize=6,
            linestyle="none", color=colours["text"], transform=axes.get_xaxis_transform(), clip_on=False,
            label=mark.kind if is_first else None,
        )  # fmt: skip
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    _rule(axes, colours, (_ticks(6), "{:.4g}".format), (_ticks(4), wording.percent), f"wall time in {unit}")


def draw_machines(axes: Axes, band: MachineBand, colours: dict[str, str]) -> None:
    """Draw the number of machines over time, with those that are missing, and a mark at each change.

    Args:
        axes: Empty axes.
        band: The machines.
        colours: Colours by role.
    """
    factor, unit = _time_unit(band.length)
    for span in band.spans:
        begin, length = span.begin * factor, (span.end - span.begin) * factor
        parts = (
            [(0, span.present, TRAINING), (span.present, band.full, MISSING)]
            if span.present
            else [(0, band.full, STILL)]
        )
        for low, high, kind in parts:
            axes.bar(begin, high - low, length, low, align="edge", **_filling(kind, colours))
    for change in band.changes:
        axes.axvline(change.second * factor, color=colours["text"], linewidth=1.2, linestyle=(0, (3, 2)))
    for kind in band.kinds:
        axes.bar(0, 0, label=kind, **_filling(kind, colours))
    axes.set_xlim(0, band.length * factor)
    axes.set_ylim(0, band.full)
    up = _ticks(4, integer=True), "{:,.0f}".format
    _rule(axes, colours, (_ticks(6), "{:.4g}".format), up, f"wall time in {unit}")


def _filling(kind: str, colours: dict[str, str]) -> dict[str, Any]:
    hatched = kind in HATCHED
    edge = colours["hatch"] if hatched else "none"
    return {"facecolor": colours[role_of(kind)], "hatch": "///" * hatched, "edgecolor": edge, "linewidth": 0}


def draw_bars(axes: Axes, rows: dict[str, dict[str, float]], colours: dict[str, str]) -> None:
    """Draw a stacked bar for each row.

    Args:
        axes: Empty axes.
        rows: GiB by component for each bar, by the bar's name.
        colours: Colours by role.
    """
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    longest = max(sum(row.values()) for row in rows.values())
    nbytes, unit = size_unit(longest * GIB)
    factor = GIB / nbytes
    for number, (label, row) in enumerate(rows.items()):
        left = 0.0
        for name, gib in row.items():
            axes.barh(
                number, gib * factor, left=left, height=0.5, color=colours[bar_role(names, name)], linewidth=1,
                edgecolor=colours["page"], label="_" * bool(number) + name,
            )  # fmt: skip
            left += gib * factor
        if label:
            axes.text(0, number - 0.36, printable(label), color=colours["text"], va="bottom", ha="left")
    axes.set_ylim(len(rows) - 0.6, -0.4 if "" in rows else -0.75)
    axes.set_xlim(0, longest * factor)
    _rule(axes, colours, (_ticks(5), lambda value: f"{value:,.4g} {unit}" if value else "0"), None, "")


def _axes(size: tuple[int, int], left: int = 58) -> Axes:
    width, height = size
    figure = Figure(figsize=(width / 72, height / 72))  # matplotlib writes SVG in points, of which 72 are an inch
    figure.patch.set_visible(False)
    axes = figure.add_axes((left / width, 38 / height, (width - left - 14) / width, (height - 38 - 16) / height))
    return _plain(axes)


def _plain(axes: Axes) -> Axes:
    """Remove matplotlib's own decorations from the axes."""
    axes.set_axis_off()
    axes.margins(x=0.01)
    return axes


def _entitle(axes: Axes, title: str, legend: bool, columns: int = 2, pad: int = 10) -> None:
    axes.set_title(printable(title), loc="left", fontsize=11, color=LIGHT["text"], fontweight="bold", pad=pad)
    if legend:  # below the plot, where it covers nothing
        axes.legend(
            fontsize=8, frameon=False, ncols=columns, labelcolor=LIGHT["text"], loc="upper left",
            bbox_to_anchor=(0, -0.28), borderaxespad=0, handlelength=2.2,
        )  # fmt: skip


def _ticks(most: int, integer: bool = False) -> MaxNLocator:
    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=integer, min_n_ticks=1 if integer else 2)


def _time_unit(seconds: float) -> tuple[float, str]:
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * unit:
            return 1 / unit, name
    return 1.0, "seconds"


def _without_family(font: re.Match[str]) -> str:
    """Return weight and size of a font, whose family the page chooses."""
    return "; ".join([*([f"font-weight: {font[1]}"] if font[1] else []), f"font-size: {font[2]}"])


def _svg(figure: Figure, name: str, label: str) -> str:
    """Return the figure as an SVG element with real text, the page's colours and unique identifiers."""
    buffer = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    whole = buffer.getvalue()
    end = "</defs>"  # the end of a style that would apply to the whole page
    body = whole[whole.index(end) + len(end) : whole.rindex("</svg>")]
    referred = {*_REFERENCE.findall(body)}
    body = _IDENTIFIER.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in referred else "", body)
    body = _REFERENCE.sub(lambda match: match[0].replace("#", f"#{name}-"), body)
    body = _PATH.sub(lambda match: _LONG.sub("", match[0]).replace("\n", ""), body)
    body = _FONT.sub(_without_family, body)
    body = _TOKEN.sub(lambda match: f"var(--{_ROLES[int(match[1], 16)]})", _SUPERFLUOUS.sub("", body))
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text(label)}">{body}</svg>'

"""The plot of `goodput_simulation.py`: the lost share of the time by size, in the colours of the page around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

WIDTH, LEFT, RIGHT = 560, 92, 14
HEIGHT, HEAD, FOOT, ENTRY = 210, 58, 44, 22
"""Heights of a panel's plot, of the two lines of its title, of the ticks below, and of an entry of the legend.

All leave room for the letters of 17 pixels that a phone shows.
"""

LOWEST, HIGHEST = 1e-4, 1.0
TICKS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
COLOURS = ("#0b62b5", "#c2410c", "#0f766e", "#a21caf", "#8a6100", "#475569")
DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2", "9 3", "3 1 1 1")


def picture(goodputs: Mapping[str, Mapping[str, Sequence[float]]], gpus: Sequence[int]) -> str:
    """Return the plot as SVG: a panel for each set of costs, with a line for each way.

    Args:
        goodputs: Goodputs by the panel's title and the way's name, at most six; one for each size.
        gpus: The sizes.
    """
    names = list(next(iter(goodputs.values())))
    parts, top = list(_legend(names)), ENTRY * len(names) + 8
    for title, ways in goodputs.items():
        parts += _panel(title, ways, gpus, top)
        top += HEAD + HEIGHT + FOOT
    label = f"Simulated share of the time that is lost, from {gpus[0]:,} to {gpus[-1]:,} GPUs; less is better. "
    label += " ".join(
        f"{title}, {gpus[-1]:,} GPUs: "
        + ", ".join(f"{_text(name)} {100 * (1 - values[-1]):.2g} %" for name, values in ways.items())
        + "."
        for title, ways in goodputs.items()
    )
    style = "font:12px 'DejaVu Sans',sans-serif;fill:var(--text,#69737f)"
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" aria-label="{label}"'
    return f'{begin} style="{style}">{"".join(parts)}</svg>\n'


def _panel(title: str, ways: Mapping[str, Sequence[float]], gpus: Sequence[int], top: int) -> Iterator[str]:
    yield f'<text y="{top + 16}" style="font-weight:bold">lost share of the time, simulated:</text>'
    yield f'<text y="{top + 38}" style="font-weight:bold">{_text(title)}</text>'
    high, low = top + HEAD, top + HEAD + HEIGHT
    for tick in TICKS:
        y = _y(tick, high)
        yield f'<path d="M{LEFT} {y:g}H{WIDTH - RIGHT}" style="stroke:var(--faint,#d0d5da)"/>'
        least = "≤ " if tick == LOWEST else ""
        yield f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end">{least}{100 * tick:g} %</text>'
    for size in gpus:
        yield f'<text x="{_x(size, gpus):g}" y="{low + 18}" text-anchor="middle">{size:,}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{low + 36}" text-anchor="end">GPUs</text>'
    for number, values in enumerate(ways.values()):
        points = [f"{_x(size, gpus):g} {_y(1 - value, high):g}" for size, value in zip(gpus, values, strict=True)]
        yield f'<path d="M{"L".join(points)}" style="{_line(number)}"/>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        y = 12 + ENTRY * number
        yield f'<path d="M2 {y}H30" style="{_line(number)}"/><text x="38" y="{y + 4}">{_text(name)}</text>'


def _line(number: int) -> str:
    dashes = f";stroke-dasharray:{DASHES[number]}" if DASHES[number] else ""
    return f"fill:none;stroke-width:2;stroke:var(--line-{number},{COLOURS[number]}){dashes}"


def _text(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


def _x(size: int, gpus: Sequence[int]) -> float:
    share = math.log(size / gpus[0]) / math.log(gpus[-1] / gpus[0])
    return round(LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 50), 1)


def _y(share: float, top: float) -> float:
    """Return the height of a share; one beyond the scale is drawn at its end."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    return round(top + HEIGHT * (high - min(max(math.log(max(share, 1e-12)), low), high)) / (high - low), 1)

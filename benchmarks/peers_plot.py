"""The plot of `peers.py`: ratios to the plain loop, as a picture that takes the colours of the page around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from page import Spread

WIDTH, LEFT, RIGHT = 560, 62, 14
ROW, HEAD, FOOT = 30, 26, 22
"""Heights of a task's row, of the title above the rows of a measure, and of the ticks below."""

LOWEST, HIGHEST = 0.2, 10.0
TICKS = (0.25, 0.5, 1, 2, 4, 8)
COLOURS = ("#0b62b5", "#c2410c", "#0f766e", "#a21caf")
SHAPES = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z", "M-3.5-3.5H3.5V3.5H-3.5Z", "M0-5L5 0L0 5L-5 0Z", "M0-4.5L4.5 3.5H-4.5Z")

Ratios = Mapping[str, Mapping[str, Mapping[str, Spread]]]
"""Ratios by the measure's title, by task and by contender."""


def picture(ratios: Ratios, names: Sequence[str]) -> str:
    """Return the plot as SVG: a panel for each measure, with a row for each task.

    Args:
        ratios: Ratios to the plain loop.
        names: Names of the contenders, at most four, in their order in `ratios`.
    """
    parts = list(_legend(names))
    top = 52
    for title, tasks in ratios.items():
        parts += _panel(title, tasks, top)
        top += HEAD + ROW * len(tasks) + FOOT
    label = "Ratios to the plain loop, on a logarithmic scale: points are medians, lines quartiles; less is better."
    style = "font:12px 'DejaVu Sans',sans-serif;fill:var(--text,#69737f)"
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" aria-label="{label}"'
    return f'{begin} style="{style}">{"".join(parts)}</svg>\n'


def _panel(title: str, tasks: Mapping[str, Mapping[str, Spread]], top: int) -> Iterator[str]:
    yield f'<text y="{top + 16}" style="font-weight:bold">{title}</text>'
    bottom = top + HEAD + ROW * len(tasks)
    for tick in TICKS:
        colour = "var(--axis,#8b95a1)" if tick == 1 else "var(--faint,#d0d5da)"
        yield f'<path d="M{_x(tick)} {top + HEAD}V{bottom}" style="stroke:{colour}"/>'
        yield f'<text x="{_x(tick)}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>'
    for number, (task, contenders) in enumerate(tasks.items()):
        middle = top + HEAD + ROW * number + ROW / 2
        yield f'<text y="{middle + 4}">{task}</text>'
        for place, ratio in enumerate(contenders.values()):
            y = middle + (place - (len(contenders) - 1) / 2) * 6
            yield f'<path d="M{_x(ratio.low)} {y}H{_x(ratio.high)}" style="stroke:{_colour(place)};stroke-width:1.5"/>'
            yield _mark(place, _x(ratio.median), y)


def _legend(names: Sequence[str]) -> Iterator[str]:
    for place, name in enumerate(names):
        x, y = 8 + place % 2 * WIDTH / 2, 12 + place // 2 * 22
        yield _mark(place, x, y) + f'<text x="{x + 10:g}" y="{y + 4}">{name}</text>'


def _mark(place: int, x: float, y: float) -> str:
    return f'<path d="{SHAPES[place]}" transform="translate({x:g} {y:g})" style="fill:{_colour(place)}"/>'


def _colour(place: int) -> str:
    return f"var(--line-{place},{COLOURS[place]})"


def _x(ratio: float) -> float:
    """Return the place of a ratio; one beyond the scale is drawn at its end."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    share = (min(max(math.log(ratio), low), high) - low) / (high - low)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

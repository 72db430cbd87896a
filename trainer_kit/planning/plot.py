"""A curve for the terminal, in braille characters: each is two dots wide and four dots high."""

from __future__ import annotations

from collections.abc import Sequence

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row and column (Unicode Standard, block U+2800)."""


def curve(points: Sequence[tuple[int, float]], width: int = 60, height: int = 6) -> list[str]:
    """Draw values over steps.

    Args:
        points: Pairs (step, value), at least one, in ascending order of steps.
        width: Width of the drawing, in characters.
        height: Height of the drawing, in characters.

    Returns:
        Lines of the drawing, with the largest value at the top and the smallest at the bottom.
    """
    columns, rows = 2 * width, 4 * height
    values = _sampled([value for _, value in points], columns)
    low, high = min(values), max(values)
    cells = [[_BLANK] * width for _ in range(height)]
    before = None
    for column, value in enumerate(values):
        row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        # Dots between two columns belong to the second, so that a steep line stays connected.
        between = () if before is None else range(min(before, row) + 1, max(before, row))
        for dot in (row, *between):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    return ["".join(map(chr, line)).rstrip(chr(_BLANK)) for line in cells]


def _sampled(values: Sequence[float], count: int) -> list[float]:
    """Return `count` values, evenly spaced."""
    if count == 1 or len(values) == 1:
        return [values[0]] * count
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]

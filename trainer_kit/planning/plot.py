"""A curve for the terminal, in braille characters: each is two dots wide and four dots high."""

from __future__ import annotations

from collections.abc import Sequence

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row and column (Unicode Standard, block U+2800)."""


def curve(points: Sequence[tuple[int, float]], width: int = 60, height: int = 6) -> list[str]:
    """Draws values over steps.

    Args:
        points: (step, value), one at least, in order of their steps.
        width: Of the drawing, in characters.
        height: The same.

    Returns:
        The drawing's lines, the greatest value at the top, the smallest at the bottom.
    """
    columns, rows = 2 * width, 4 * height
    values = _sampled([value for _, value in points], columns)
    low, high = min(values), max(values)
    cells = [[_BLANK] * width for _ in range(height)]
    before = None
    for column, value in enumerate(values):
        row = round((high - value) / (high - low) * (rows - 1)) if high > low else rows // 2
        # What lies between two columns belongs to the second: a steep line stays a line.
        between = () if before is None else range(min(before, row) + 1, max(before, row))
        for dot in (row, *between):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    return ["".join(map(chr, line)).rstrip(chr(_BLANK)) for line in cells]


def _sampled(values: Sequence[float], count: int) -> list[float]:
    """So many values, evenly spread."""
    if count == 1 or len(values) == 1:
        return [values[0]] * count
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]

"""A curve for the terminal, in box-drawing characters.

Fonts for code have them, as wide as a letter. They lack braille and take it from other fonts, where it is wider: in a
browser, the curve would stick out of its frame.
"""

from __future__ import annotations

from collections.abc import Sequence


def curve(points: Sequence[tuple[int, float]], width: int = 60, height: int = 8) -> list[str]:
    """Draw values over steps.

    Args:
        points: Pairs (step, value), at least one, in ascending order of steps.
        width: Width of the drawing, in characters.
        height: Height of the drawing, in characters.

    Returns:
        Lines of the drawing, with the largest value at the top and the smallest at the bottom.
    """
    values = _sampled([value for _, value in points], width)
    low, high = min(values), max(values)
    cells = [[" "] * width for _ in range(height)]
    before = None
    for column, value in enumerate(values):
        row = round((high - value) / (high - low) * (height - 1)) if high > low else height // 2
        before = row if before is None else before
        if row == before:
            cells[row][column] = "─"
        else:
            is_rising = row < before
            cells[before][column] = "┘" if is_rising else "┐"
            cells[row][column] = "┌" if is_rising else "└"
            for between in range(min(before, row) + 1, max(before, row)):
                cells[between][column] = "│"
        before = row
    return ["".join(line).rstrip() for line in cells]


def _sampled(values: Sequence[float], count: int) -> list[float]:
    """Return `count` values, evenly spaced."""
    if count == 1 or len(values) == 1:
        return [values[0]] * count
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]

"""Colours of a report by role, distinguishable with any colour vision.

Lines also differ in their dashes, adjacent areas differ in lightness, and lost time and downtime are hatched. Against
the page, text has a contrast of at least 4.5 and lines of at least 3 (WCAG 2.2, 1.4.3 and 1.4.11), in the light and in
the dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence

LIGHT = {
    "text": "#3f4750", "faint": "#e4e8ec", "axis": "#8b95a1", "page": "#ffffff",
    "line-0": "#0b62b5", "line-1": "#c2410c", "line-2": "#0f766e", "line-3": "#a21caf", "line-4": "#8a6100",
    "line-5": "#475569",
    "forward": "#0b4f95", "backward": "#3f86c8", "optimizer": "#94c6eb", "data": "#e8912d", "evaluation": "#8e4fb0",
    "saving": "#d9b92f", "logging": "#2a9d8f", "setup": "#64748b", "loop": "#aab4c0", "unknown": "#dde2e8",
    "lost": "#cf4a3a", "down": "#f1f2f4", "hatch": "#8b95a1",
}  # fmt: skip

DARK = {
    "text": "#c3cad2", "faint": "#2b3138", "axis": "#69737f", "page": "#1a1e23",
    "line-0": "#62aef5", "line-1": "#ff9152", "line-2": "#3ecfb2", "line-3": "#e07be8", "line-4": "#e0b93d",
    "line-5": "#aab4c0",
    "forward": "#1d69b5", "backward": "#57a0e2", "optimizer": "#acd5f6", "data": "#f0a34a", "evaluation": "#b080d2",
    "saving": "#e3c84b", "logging": "#43bfae", "setup": "#8391a4", "loop": "#566270", "unknown": "#353c45",
    "lost": "#e2604f", "down": "#22272d", "hatch": "#69737f",
}  # fmt: skip

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (9, 3), (3, 1, 1, 1))
"""Lengths of dashes and gaps, in line widths, for each line colour."""

_ACTIVITIES = {
    "logging and callbacks": "logging", "not recorded": "unknown",
    "training": "forward", "missing": "lost", "standing still": "down",
}  # fmt: skip
_COMPONENTS = {"weights": "forward", "gradients": "backward", "optimizer": "optimizer", "activations": "data"}
_OTHERS = ("evaluation", "logging", "saving", "setup", "loop")


def role_of(activity: str) -> str:
    """Return the role of an activity of the timeline, or of a kind of time of the machines."""
    return _ACTIVITIES.get(activity, activity)


def bar_role(names: Sequence[str], name: str) -> str:
    """Return the role of `name` among the memory components `names`."""
    rest = [each for each in names if each not in _COMPONENTS]
    return _COMPONENTS.get(name) or _OTHERS[rest.index(name) % len(_OTHERS)]


def variables() -> str:
    """Return the style sheet's rules that assign a colour to each role."""
    light, dark = ("".join(f"--{role}:{colour};" for role, colour in each.items()) for each in (LIGHT, DARK))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"

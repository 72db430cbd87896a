"""Contrasts by the formula of WCAG 2.2 ("relative luminance", "contrast ratio")."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from trainer_kit.report.colours import DARK, DASHES, LIGHT
from trainer_kit.report.panels import RUNS
from trainer_kit.report.timeline import SHOWN

SHEET = resources.files("trainer_kit.report").joinpath("style.css").read_text(encoding="utf-8")
BLOCKS = [
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", SHEET, re.S)
]
SCHEMES = {"light": LIGHT | BLOCKS[0], "dark": DARK | BLOCKS[1]}


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read(scheme: str) -> None:
    colours = SCHEMES[scheme]
    pairs = [(ink, ground) for ink in ("ink", "quiet", "link") for ground in ("ground", "page")]
    pairs += [("text", "page"), *((kind, f"{kind}-ground") for kind in ("good", "bad", "open"))]
    for ink, ground in pairs:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lines_stand_out(scheme: str) -> None:
    colours = SCHEMES[scheme]
    for role in (*(f"line-{number}" for number in range(RUNS)), "axis"):
        assert contrast(colours[role], colours["page"]) >= 3, role


@pytest.mark.parametrize("scheme", SCHEMES)
def test_areas_that_touch_differ_in_lightness(scheme: str) -> None:
    colours = SCHEMES[scheme]
    for one, other in (("forward", "backward"), ("backward", "optimizer"), ("optimizer", "data"), ("lost", "down")):
        assert contrast(colours[one], colours[other]) >= 1.3, (one, other)


def test_every_role_is_in_both_schemes() -> None:
    assert list(LIGHT) == list(DARK)
    assert set(BLOCKS[0]) == set(BLOCKS[1])
    assert len(set(DASHES)) == len(DASHES) == RUNS
    used = set(re.findall(r"var\(--([\w-]+)\)", SHEET))
    assert used <= set(SCHEMES["light"])
    assert len(SHOWN) == len(set(SHOWN))

"""The page as a browser shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import browser
from kit.run_logs import eventful, finished

from trainer_kit.report import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.COMMAND is None, reason="there is no chromium or google-chrome"),
]

# Colours as the browser computes them, and elements that reach beyond the screen.
GROUND = "getComputedStyle(document.body).backgroundColor"
LINE = "getComputedStyle(document.querySelector('figure svg[role=img] path[style*=line-0]')).stroke"
TOO_WIDE = """
[...document.querySelectorAll('body *')]
    .filter(each => each.getBoundingClientRect().right > innerWidth && !each.closest('.skip, .hidden, thead'))
    .map(each => each.tagName + ' ' + each.textContent.slice(0, 40))
"""
SHOWN = "[...document.querySelectorAll('svg[role=img]')].filter(each => each.getBoundingClientRect().width > 0)"
SMALLEST = f"""
Math.min(...{SHOWN}.flatMap(plot => [...plot.querySelectorAll('text')]
    .map(each => parseFloat(getComputedStyle(each).fontSize) * plot.getBoundingClientRect().width
        / plot.viewBox.baseVal.width)))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [finished(folder / "a"), eventful(folder / "b"), finished(folder / "c", noise=3)]
    return {"one": write_report(runs[1]), "three": write_report(runs[0], folder / "three.html", compare=runs[1:])}


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    with browser.browser() as opened:
        yield opened


@pytest.mark.parametrize("name", ["one", "three"])
def test_nothing_is_asked_for_and_nothing_complained_of(page: browser.Page, files: dict[str, Path], name: str) -> None:
    page.messages.clear()
    page.requests.clear()
    page.open(files[name])
    assert page.requests == [files[name].as_uri()]
    assert page.messages == []
    assert page.evaluate(f"{SHOWN}.length") >= 8


@pytest.mark.parametrize("name", ["one", "three"])
def test_a_phone_shows_all_of_it(page: browser.Page, files: dict[str, Path], name: str) -> None:
    page.open(files[name], width=390)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(SMALLEST) >= 10


def test_plots_fit_the_screen(page: browser.Page, files: dict[str, Path]) -> None:
    page.open(files["one"])
    figures = page.evaluate("document.querySelectorAll('figure').length")
    for width in (390, 1280):
        page.open(files["one"], width)
        assert page.evaluate(f"{SHOWN}.length") == figures
    assert 10 < page.evaluate(SMALLEST) < 16


def test_paper_shows_colours_and_two_plots_a_row(page: browser.Page, files: dict[str, Path]) -> None:
    page.open(files["one"], width=720)
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert page.evaluate("getComputedStyle(document.querySelector('.area')).printColorAdjust") == "exact"
        assert len(page.evaluate("getComputedStyle(document.querySelector('.grid')).gridTemplateColumns").split()) == 2
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


def test_light_and_dark(page: browser.Page, files: dict[str, Path]) -> None:
    page.open(files["one"])
    assert [page.evaluate(GROUND), page.evaluate(LINE)] == ["rgb(244, 246, 248)", "rgb(11, 98, 181)"]
    page.open(files["one"], dark=True)
    assert [page.evaluate(GROUND), page.evaluate(LINE)] == ["rgb(15, 18, 21)", "rgb(98, 174, 245)"]


def test_the_keyboard_is_enough(page: browser.Page, files: dict[str, Path]) -> None:
    page.open(files["one"])
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") == "report"
    page.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open") is True


@pytest.mark.parametrize("width", [390, 1280])
def test_a_screen_reader_meets_plots_and_tables(page: browser.Page, files: dict[str, Path], width: int) -> None:
    page.open(files["three"], width)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")]
    roles = [role for role, _ in seen]
    assert all(name for role, name in seen if role == "image")
    assert sum(role == "image" for role in roles) == page.evaluate("document.querySelectorAll('figure').length")
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert roles.count(landmark) == 1
    assert ("table", "Key figures of the runs") in seen
    assert {"Goodput", "Wall time"} <= {name for role, name in seen if role == "rowheader"}
    assert {"a", "b", "c"} <= {name for role, name in seen if role == "columnheader"}

"""All pages of the built site fit, keep the rules of WCAG that axe-core checks, and write nothing to the console."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from kit.browser import COMMAND, Page, browser

pytest.importorskip("axe_playwright_python", reason="needs the extra docs")
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(COMMAND is None, reason="needs a browser"),
]

WIDTHS = {1280, PHONE := 390}
VIEWS = [(1280, False), (PHONE, True), (1280, True), (PHONE, False)]
"""Each a width of the screen, and whether colours are dark."""
IN_ALL_VIEWS = "ALL_VIEWS" in os.environ
"""Whether axe checks each page in all views, and all of its elements; else in one view, and elements of a kind once."""

# Colours take nine tenths of the time, and are the same for elements with the same classes in elements with the same.
ONE_OF_A_KIND = """
axe.configure({ rules: [{ id: 'color-contrast', selector: ':not([data-repeated])' }] })
const own = each => [each.tagName, each.getAttribute('class'), each.getAttribute('style')].join()
const path = each => each ? path(each.parentElement) + own(each) : ''
const kinds = new Set()
for (const each of document.body.querySelectorAll('*')) {
    const kind = path(each)
    each.toggleAttribute('data-repeated', kinds.has(kind))
    kinds.add(kind)
}
"""
# The frame in which the search runs is empty.
CHECK = """
new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
    .then(() => document.getAnimations().forEach(each => each.finish()))
    .then(() => axe.run({ iframes: false, preload: false, resultTypes: ['violations'], runOnly: TAGS }))
    .then(result => result.violations.flatMap(({ id, nodes }) => nodes.map(node => `${id}: ${node.html}`)))
""".replace("TAGS", str(["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]))

PLANTED = """
<!doctype html>
<html lang="en">
<meta name="viewport" content="width=device-width">
<title>Faults</title>
<style>
  pre { overflow: auto; }
  p { color: #333; background: #fff; }
  @media (prefers-color-scheme: dark) { p { background: #000; } }
</style>
<main>
  <p>This is dark on dark.</p>
  <pre>On a phone this line scrolls, but the keyboard does not reach it.</pre>
  <img src="http://localhost:9">
  <table class="md-typeset"><td><div style="width: 2000px"></div></table>
</main>
<script>console.error("planted")</script>
"""

# Tables of many figures may scroll, the page never.
TOO_WIDE = """
[
    document.documentElement,
    ...(innerWidth < 600 ? document.querySelectorAll('.md-typeset td') : []),
    ...[...document.querySelectorAll('.md-typeset__scrollwrap')].filter(each => !each.querySelector('th:nth-child(6)')),
]
    .filter(each => each.scrollWidth > each.clientWidth)
    .map(each => each.tagName + ' ' + each.textContent.trim().slice(0, 40))
"""
# Headings that are one line taller because of their link, which is invisible.
TOO_TALL = """
[...document.querySelectorAll('.headerlink')].filter(link => {
    const height = link.parentElement.offsetHeight
    link.style.display = 'none'
    const without = link.parentElement.offsetHeight
    link.style.display = ''
    return height > without + 10
}).map(link => link.parentElement.textContent)
"""
CUT_TEXTS = """
[...document.querySelectorAll('.plot svg text, svg[role=img] text')].filter(text => {
    const [shown, whole] = [text.ownerSVGElement, text].map(each => each.getBoundingClientRect())
    return whole.left < shown.left - 1 || whole.right > shown.right + 1
}).map(text => text.textContent)
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def violations(page: Page) -> list[str]:
    """Returns what axe finds in the open page."""
    page.call("Runtime.evaluate", expression=AXE if IN_ALL_VIEWS else AXE + ONE_OF_A_KIND)
    found: list[str] = page.evaluate(CHECK)
    return found


def faults(page: Page, path: Path, width: int, dark: bool) -> list[str]:
    """Opens a page, and returns what axe finds, what does not fit, and what the page writes to the console."""
    page.messages.clear()
    page.requests.clear()
    page.open(path, width, dark)
    found = violations(page)
    for each in (width, *WIDTHS - {width}):
        page.resize(each)
        checks = (TOO_WIDE, CUT_TEXTS, TOO_TALL) if each == PHONE else (TOO_WIDE, CUT_TEXTS)
        found += [f"fit: {part}" for check in checks for part in page.evaluate(check)]
    found += [f"console: {message}" for message in page.messages]
    return found + [f"request: {request}" for request in page.requests if request.startswith("http")]


@pytest.mark.parametrize("language", ["en", "ar"])
def test_all_pages_are_without_fault(language: str, page: Page, site: Path) -> None:
    wrong = {}
    for number, path in enumerate(sorted((site / language).rglob("*.html"))):
        views = VIEWS if IN_ALL_VIEWS else [VIEWS[number % len(VIEWS)]]
        if found := [each for view in views for each in faults(page, path, *view)]:
            wrong[path.name] = found
    assert wrong == {}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("language", ["en", "ar"])
@pytest.mark.parametrize("opener", ["button[for=__drawer]", "button[for=__toc]", ".md-select > button"])
def test_what_the_keyboard_opens_on_a_phone_has_no_fault(
    opener: str, language: str, dark: bool, page: Page, site: Path
) -> None:
    page.open(site / language / "how-to" / "data.html", PHONE, dark)
    page.wait_for(f"document.querySelector('{opener}') !== null")
    page.evaluate(f"document.querySelector('{opener}').focus()")
    page.press("Enter")
    page.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-nav__link, .md-select__link')")
    assert violations(page) == []


def test_planted_faults_are_found(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "planted.html"
    path.write_text(PLANTED, encoding="utf-8")
    always = {"console", "fit", "image-alt", "request"}
    for width, dark in VIEWS:
        some = {"color-contrast": dark, "scrollable-region-focusable": width == PHONE}
        found = {each.split(":")[0] for each in faults(page, path, width, dark)}
        assert found == always | {name for name, is_there in some.items() if is_there}

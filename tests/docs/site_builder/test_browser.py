"""The built site works from files, in both languages, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.browser import COMMAND, Page, browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMMAND is None, reason="needs a browser"),
]

SCHEME = "document.body.dataset.mdColorScheme"
DIRECTIONS = "[...document.querySelectorAll('pre, code, .plot')].map(part => getComputedStyle(part).direction)"
# Tables of many figures may scroll.
TOO_WIDE = """
[document.documentElement, ...document.querySelectorAll('.md-typeset__scrollwrap')]
    .filter(each => each.scrollWidth > each.clientWidth && !each.querySelector('th:nth-child(6)'))
    .map(each => each.tagName + ' ' + each.textContent.trim().slice(0, 40))
"""
DIALOG = "[...document.body.children].map(each => each.shadowRoot).find(each => each)"
RESULTS = f"[...{DIALOG}.querySelectorAll('li h2')].map(each => each.textContent)"
FIRST_CODE_AS_SHOWN = f"""
(() => {{
    const letters = []
    const texts = document.createNodeIterator({DIALOG}.querySelector('li code'), NodeFilter.SHOW_TEXT)
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {{
        for (let i = 0; i < text.data.length; i++) {{
            const range = document.createRange()
            range.setStart(text, i)
            range.setEnd(text, i + 1)
            letters.push([range.getBoundingClientRect().left, text.data[i]])
        }}
    }}
    return letters.sort((a, b) => a[0] - b[0]).map(each => each[1]).join('')
}})()
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("language", ["en", "ar"])
def test_all_pages_fit_and_write_no_error(language: str, page: Page, site: Path) -> None:
    wrong = {}
    for path in sorted((site / language).rglob("*.html")):
        page.messages.clear()
        page.requests.clear()
        page.open(path)
        fetched = [request for request in page.requests if request.startswith("http")]
        if found := [*page.messages, *fetched, *page.evaluate(TOO_WIDE)]:
            wrong[path.name] = found
    assert wrong == {}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("en/index.html", "en/reference/arguments.html"),
        *("ar/index.html", "ar/how-to/tpu.html", "ar/tutorials/first-training.html"),
    ],
)
def test_a_page_fits_in_its_scheme_and_direction(name: str, dark: bool, width: int, page: Page, site: Path) -> None:
    page.open(site / name, width, dark)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(SCHEME) == ("slate" if dark else "default")
    assert page.evaluate("document.body.dir") == ("rtl" if name.startswith("ar") else "ltr")
    assert {*page.evaluate(DIRECTIONS)} == {"ltr"}


def search(page: Page, text: str) -> list[str]:
    """Types a text into the search of the open page, and returns the titles of what it finds."""
    page.wait_for("document.querySelector('iframe') !== null")
    page.wait_for(f"{DIALOG} !== undefined")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="k", code="KeyK", windowsVirtualKeyCode=75, modifiers=2)
    page.wait_for(f"{DIALOG}.activeElement?.matches('input')")
    page.type(text)
    page.wait_for(f"{RESULTS}.length > 0")
    assert page.evaluate(f"{DIALOG}.querySelector('input').value") == text
    found: list[str] = page.evaluate(RESULTS)
    return found


def test_the_search_keeps_what_is_typed_and_finds_it(page: Page, site: Path) -> None:
    page.messages.clear()
    page.open(site / "en" / "index.html")
    assert any("gradient_accumulation_steps" in title for title in search(page, "gradient_accumulation_steps"))
    assert page.messages == []


def test_the_arabic_search_ignores_diacritics(page: Page, site: Path) -> None:
    found = []
    for text in ("التدرّجات", "التدرجات"):
        page.open(site / "ar" / "index.html")
        found.append(search(page, text))
    assert found[0] == found[1]
    assert "تراكم التدرجات" in found[0]


def test_the_arabic_search_speaks_arabic_and_keeps_code_from_left_to_right(page: Page, site: Path) -> None:
    page.open(site / "ar" / "index.html")
    search(page, "--nproc")
    words = page.evaluate(
        f"[{DIALOG}.querySelector('[role=status]').textContent,"
        f"...[...{DIALOG}.querySelectorAll('[aria-label], [placeholder]')].filter(each => each.checkVisibility())"
        ".flatMap(each => [each.ariaLabel, each.placeholder]).filter(each => each)]"
    )
    assert len(words) >= 5
    assert [word for word in words if not all(ord(letter) >= 0x600 for letter in word if letter.isalpha())] == []
    shown = page.evaluate(FIRST_CODE_AS_SHOWN)
    assert shown == page.evaluate(f"{DIALOG}.querySelector('li code').textContent")
    assert "--nproc" in shown


@pytest.mark.parametrize(("language", "word"), [("en", "gradient"), ("ar", "التدرجات")])
def test_the_search_and_the_languages_need_no_mouse(language: str, word: str, page: Page, site: Path) -> None:
    def tab_to(selector: str) -> None:
        page.open(site / language / "index.html")
        page.wait_for(f"{DIALOG} !== undefined")
        for _ in range(10):
            page.press("Tab")
            if page.evaluate(f"document.activeElement.matches('{selector}')"):
                return
        raise AssertionError(f"ten times Tab do not lead to {selector}")

    tab_to(".md-search__button")
    page.press("Enter")
    page.wait_for(f"{DIALOG}.activeElement?.matches('input')")
    page.type(word)
    page.wait_for(f"{RESULTS}.length > 0")
    page.press("Enter")
    page.wait_for("location.search.startsWith('?h=')")
    other = {"en": "ar", "ar": "en"}[language]
    tab_to(f"[hreflang={other}]")
    page.press("Enter")
    page.wait_for(f"document.documentElement?.lang === '{other}' && document.readyState === 'complete'")
    named = page.evaluate("document.querySelector('.headerlink').title")
    assert named == {"en": "Link to this section", "ar": "رابط إلى هذا القسم"}[other]


def test_the_filter_leaves_the_rows_that_have_the_words(page: Page, site: Path) -> None:
    page.open(site / "en" / "reference" / "arguments.html")
    shown = "[...document.querySelectorAll('#arguments tbody tr')].filter(row => !row.hidden).length"
    everything = page.evaluate(shown)
    page.evaluate("document.getElementById('filter-arguments').focus()")
    page.call("Input.insertText", text="accumulate_grad_batches")
    assert everything > 60
    assert page.evaluate(shown) == 1


def test_the_scheme_follows_the_system_until_the_reader_chooses_one_for_both_languages(site: Path) -> None:
    with browser() as page:
        page.open(site / "en" / "index.html", dark=False)
        assert page.evaluate(SCHEME) == "default"
        page.emulate(dark=True)
        page.wait_for(f"{SCHEME} === 'slate'")
        page.open(site / "en" / "how-to" / "train.html", dark=False)
        assert page.evaluate(SCHEME) == "default"
        page.evaluate("document.querySelector('label[for=__palette_1]').click()")
        page.wait_for(f"{SCHEME} === 'slate'")
        page.open(site / "ar" / "index.html", dark=False)
        assert page.evaluate(SCHEME) == "slate"
        page.evaluate("document.querySelector('label[for=__palette_0]').click()")
        page.wait_for(f"{SCHEME} === 'default'")
        page.emulate(dark=True)
        assert page.evaluate(f"new Promise(done => setTimeout(() => done({SCHEME}), 300))") == "default"
        page.open(site / "en" / "index.html", dark=True)
        assert page.evaluate(SCHEME) == "default"

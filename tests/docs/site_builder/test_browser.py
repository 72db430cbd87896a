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
# Pieces of code in tables that continue on another line though a line has room for them.
BROKEN_WORDS = """
[...document.querySelectorAll('.md-typeset td + td code')].flatMap(code => {
    const texts = document.createNodeIterator(code, NodeFilter.SHOW_TEXT)
    const found = []
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        for (const { 0: word, index } of text.data.matchAll(/[A-Za-z0-9]+/g)) {
            const range = document.createRange()
            range.setStart(text, index)
            range.setEnd(text, index + word.length)
            const lines = new Set([...range.getClientRects()].map(each => Math.round(each.top)))
            if (lines.size > 1 && word.length < 12 && !/[a-z][A-Z]/.test(word)) found.push(word)
        }
    }
    return found
})
"""
# Blocks of code whose lines end outside of the page.
CUT_CODE = """
[...document.querySelectorAll('CODE')]
    .filter(each => each.scrollWidth > each.clientWidth)
    .map(each => each.textContent.slice(0, 40))
"""
# By how many letters the lines of the first text that wraps are indented.
LEFT_ENDS = """
[...document.querySelectorAll('.language-text code')].map(code => {
    const [text, range] = [code.lastChild, document.createRange()]
    const line = text.data.split('\\n')[0]
    const starts = new Map()
    for (let i = 0; i < line.length; i++) {
        range.setStart(text, i)
        range.setEnd(text, i + 1)
        const { left, top, width } = range.getBoundingClientRect()
        if (!starts.has(top)) starts.set(top, left / width)
    }
    const lefts = [...starts.values()]
    return lefts.map(each => Math.round(each - lefts[0]))
}).find(each => each.length === 2)
"""
SHOWN_HEADS = """
[...document.querySelectorAll('.md-typeset th')]
    .filter(head => [head, head.closest('thead')].every(each => getComputedStyle(each).clipPath === 'none'))
    .map(head => head.textContent)
"""
FOCUS = """
(() => {
    const { left, right, width } = document.activeElement.getBoundingClientRect()
    return [document.activeElement.getAttribute('for') ?? '', width === 0 || left >= 0 && right <= innerWidth]
})()
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


# How much the parts of a result that are not black stand out from the page.
CONTRASTS = f"""
(() => {{
    const levels = color => color.match(/[\\d.]+/g).map(Number)
    const page = levels(getComputedStyle(document.body).backgroundColor)
    const luminance = color => color
        .map(level => level / 255)
        .map(level => level <= 0.04045 ? level / 12.92 : ((level + 0.055) / 1.055) ** 2.4)
        .reduce((sum, level, index) => sum + level * [0.2126, 0.7152, 0.0722][index], 0) + 0.05
    return ['mark', '[id$="-path"]'].map(part => {{
        const [red, green, blue, alpha = 1] = levels(getComputedStyle({DIALOG}.querySelector(part)).color)
        const seen = [red, green, blue].map((level, index) => level * alpha + page[index] * (1 - alpha))
        const [low, high] = [luminance(seen), luminance(page.slice(0, 3))].sort((a, b) => a - b)
        return high / low
    }})
}})()
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


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


@pytest.mark.parametrize(
    "name",
    ["en/how-to/trackers", "ar/how-to/trackers", "en/explanation/architecture", "en/project/contributing"],
)
def test_code_in_tables_breaks_between_its_words(name: str, page: Page, site: Path) -> None:
    page.open(site / f"{name}.html")
    assert page.evaluate(BROKEN_WORDS) == []


@pytest.mark.parametrize(
    "name",
    [
        *(
            "en/explanation/comparison",
            "en/explanation/anatomy",
            "en/explanation/architecture",
            "en/how-to/checkpoints",
        ),
        *("en/tutorials/memory-and-time", "en/tutorials/own-loop", "ar/how-to/tpu", "en/reference/command-line"),
        *("en/coming-from/transformers", "en/coming-from/accelerate"),
    ],
)
def test_results_and_commands_are_whole(name: str, page: Page, site: Path) -> None:
    page.open(site / f"{name}.html")
    whole = ".language-text code, .language-sh code, .side-by-side code"
    assert page.evaluate(CUT_CODE.replace("CODE", whole)) == []
    page.resize(390)
    assert page.evaluate(CUT_CODE.replace("CODE", ".language-text.prose code")) == []


@pytest.mark.parametrize("name", ["en/explanation/comparison", "en/reference/command-line"])
def test_the_rest_of_a_long_line_is_indented(name: str, page: Page, site: Path) -> None:
    page.open(site / f"{name}.html")
    assert page.evaluate(LEFT_ENDS) == [0, 2]


@pytest.mark.parametrize("width", [390, 1280])
def test_short_code_stays_on_one_line_of_an_arabic_text(width: int, page: Page, site: Path) -> None:
    page.open(site / "ar" / "tutorials" / "tpu.html", width)
    lines = page.evaluate(
        """
        [...document.querySelectorAll('.md-typeset p > code')].map(code => [
            code.textContent,
            new Set([...code.getClientRects()].map(each => Math.round(each.top))).size,
        ])
        """
    )
    assert ['pip install -e ".[xla]"', 1] in lines
    assert {count for text, count in lines if len(text) <= 30} == {1}


@pytest.mark.parametrize(("language", "is_right"), [("en", True), ("ar", False)])
def test_on_a_phone_the_contents_open_at_the_ends_of_lines(
    language: str, is_right: bool, page: Page, site: Path
) -> None:
    page.open(site / language / "how-to" / "data.html", width=390)
    left, right = page.evaluate(
        """
        ['left', 'right'].map(side => ['.md-sidebar-button', '.md-sidebar--secondary .md-sidebar__inner']
            .map(part => document.querySelector(part).getBoundingClientRect()[side]))
        """
    )
    assert all(195 < each < 390 for each in right) if is_right else all(0 < each < 195 for each in left)
    assert min(left) > 0
    assert max(right) < 390


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


@pytest.mark.parametrize("language", ["en", "ar"])
def test_a_phone_needs_no_touch(language: str, page: Page, site: Path) -> None:
    page.open(site / language / "how-to" / "data.html", 390)
    page.wait_for(f"{DIALOG} !== undefined")
    passed = []
    for _ in range(8):
        page.press("Tab")
        name, is_on_screen = page.evaluate(FOCUS)
        assert is_on_screen
        passed.append(name)
    assert {"__drawer", "__search", "__toc"} <= {*passed}

    opened = "document.querySelector('.md-sidebar--primary').contains(document.activeElement)"
    page.evaluate("document.querySelector('.md-header__button[for=__drawer]').focus()")
    page.press("Enter")
    page.wait_for(opened)
    page.press("Escape")
    page.wait_for("document.activeElement.matches('.md-header__button[for=__drawer]')")
    assert not page.evaluate("document.getElementById('__drawer').checked")
    page.evaluate("document.querySelector('.md-header__button[for=__search]').focus()")
    page.press("Enter")
    page.wait_for(f"{DIALOG}.activeElement?.matches('input')")


@pytest.mark.parametrize("language", ["en", "ar"])
def test_on_a_phone_the_keyboard_opens_the_table_of_contents(language: str, page: Page, site: Path) -> None:
    in_contents = "document.querySelector('.md-sidebar--secondary .md-sidebar__inner').contains(document.activeElement)"
    on_button = "document.activeElement.matches('.md-sidebar-button')"
    page.open(site / language / "how-to" / "data.html", 390)
    page.wait_for("document.querySelector('.md-sidebar-button')?.ariaExpanded === 'false'")
    page.evaluate("document.querySelector('.md-sidebar-button').focus()")
    page.press("Tab")
    assert not page.evaluate(in_contents)
    page.evaluate("document.querySelector('.md-sidebar-button').focus()")
    page.press("Enter")
    page.wait_for(in_contents)
    page.press("Tab")
    assert page.evaluate(in_contents)
    page.press("Escape")
    page.wait_for(on_button)
    assert page.evaluate("document.activeElement.ariaExpanded") == "false"


@pytest.mark.parametrize("name", ["en/explanation/performance", "ar/how-to/data"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_keyboard_scrolls_wide_code_and_tables_and_stops_at_no_other(
    width: int, name: str, page: Page, site: Path
) -> None:
    page.open(site / f"{name}.html", width)
    wrong = """
        [...document.querySelectorAll('.md-typeset__scrollwrap, pre > code')]
            .filter(each => SELECTED).map(each => each.textContent.trim().slice(0, 40))
    """
    page.wait_for(
        wrong.replace("SELECTED", "each.scrollWidth > each.clientWidth && each.tabIndex < 0") + ".length === 0"
    )
    stops = "each.matches('.md-typeset__scrollwrap') && each.scrollWidth === each.clientWidth && each.tabIndex >= 0"
    assert page.evaluate(wrong.replace("SELECTED", stops)) == []


@pytest.mark.parametrize("language", ["en", "ar"])
def test_the_keyboard_copies_code(language: str, page: Page, site: Path) -> None:
    page.open(site / language / "how-to" / "data.html")
    page.wait_for("document.querySelector('.md-code__button') !== null")
    page.evaluate("document.querySelector('.md-code__button').focus()")
    page.press("Enter")
    page.wait_for("document.querySelector('.md-dialog--active')?.textContent.trim().length > 0")


def test_on_a_phone_tables_are_named_by_their_first_head(page: Page, site: Path) -> None:
    page.open(site / "en" / "explanation" / "performance.html", 390)
    assert {"MLP", "BERT", "GPT-2"} <= {*page.evaluate(SHOWN_HEADS)}
    page.open(site / "en" / "reference" / "command-line.html", 390)
    assert {"exit code", "meaning"} <= {*page.evaluate(SHOWN_HEADS)}


@pytest.mark.parametrize("dark", [False, True])
def test_the_results_of_a_search_stand_out_from_the_page(dark: bool, page: Page, site: Path) -> None:
    page.open(site / "en" / "index.html", 1280, dark)
    search(page, "gradient")
    assert min(page.evaluate(CONTRASTS)) >= 4.5


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
        page.wait_for("document.querySelector('[name=__palette]:checked') !== null")
        page.evaluate("document.querySelector('[name=__palette]:checked').focus()")
        page.press("Enter")
        page.wait_for(f"{SCHEME} === 'slate'")
        page.open(site / "ar" / "index.html", dark=False)
        assert page.evaluate(SCHEME) == "slate"
        page.evaluate("document.querySelector('label[for=__palette_0]').click()")
        page.wait_for(f"{SCHEME} === 'default'")
        page.emulate(dark=True)
        assert page.evaluate(f"new Promise(done => setTimeout(() => done({SCHEME}), 300))") == "default"
        page.open(site / "en" / "index.html", dark=True)
        assert page.evaluate(SCHEME) == "default"

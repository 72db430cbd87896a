"""The navigation holds each page; the built site works from files, in both languages, in a browser."""

from __future__ import annotations

import time
from pathlib import Path, PurePosixPath

import pytest
from kit.browser import COMMAND, browser
from site_builder.build import navigation

SECTIONS = [
    {"title": {"en": "Home", "ar": "البداية"}, "pages": ["index"]},
    {
        "title": {"en": "How-to", "ar": "أدلة"},
        "folder": "how-to",
        "pages": ["train", "data"],
        "groups": [{"title": {"en": "All", "ar": "الكل"}, "folder": "how-to/all", "pages": "*"}],
    },
]


def paths(*names: str) -> set[PurePosixPath]:
    return {PurePosixPath(name) for name in names}


def test_the_order_is_that_of_the_file() -> None:
    pages = paths("index.md", "how-to/data.md", "how-to/train.md", "how-to/all/b.md", "how-to/all/a.md")
    assert navigation(SECTIONS, "en", pages) == [
        {"Home": "index.md"},
        {"How-to": ["how-to/train.md", "how-to/data.md", {"All": ["how-to/all/a.md", "how-to/all/b.md"]}]},
    ]


def test_a_section_that_is_not_translated_leads_to_the_english_one() -> None:
    english = {"أدلة (EN)": "../en/how-to/index.html"}
    assert navigation(SECTIONS, "ar", paths("index.md")) == [{"البداية": "index.md"}, english]


def test_a_page_that_is_not_translated_yet_is_left_out() -> None:
    assert navigation(SECTIONS, "ar", paths("index.md", "how-to/train.md"))[1] == {"أدلة": ["how-to/train.md"]}


def test_a_page_that_is_missing_or_not_listed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nav.yaml names how-to/data.md, which docs/en lacks"):
        navigation(SECTIONS, "en", paths("index.md", "how-to/train.md"))
    with pytest.raises(ValueError, match=r"nav.yaml lacks other.md of docs/ar"):
        navigation(SECTIONS, "ar", paths("index.md", "other.md"))


needs_browser = pytest.mark.skipif(COMMAND is None, reason="needs a browser")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("en/index.html", "en/reference/arguments.html"),
        *("ar/index.html", "ar/how-to/tpu.html", "ar/tutorials/first-training.html"),
    ],
)
def test_a_page_fits_and_writes_no_error(name: str, dark: bool, width: int, site: Path) -> None:
    with browser() as page:
        page.open(site / name, width, dark)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
        assert page.evaluate("document.body.dir") == ("rtl" if name.startswith("ar") else "ltr")
        directions = "[...document.querySelectorAll('pre, code, .plot')].map(part => getComputedStyle(part).direction)"
        assert {*page.evaluate(directions)} == {"ltr"}
        assert page.messages == []
        assert not [request for request in page.requests if request.startswith("http")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.browser
@needs_browser
def test_the_search_works_from_files(site: Path) -> None:
    with browser() as page:
        page.open(site / "en" / "index.html")
        wait_for(page, "document.querySelector('iframe') !== null")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="k", code="KeyK", windowsVirtualKeyCode=75, modifiers=2)
        # The search is drawn inside a shadow root.
        found = (
            "[...document.querySelectorAll('*')].filter(e => e.shadowRoot).map(e => e.shadowRoot.textContent).join()"
        )
        time.sleep(0.5)
        page.call("Input.insertText", text="gradient_accumulation_steps")
        wait_for(page, f"{found}.includes('gradient_accumulation_steps')")
        assert page.messages == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.browser
@needs_browser
def test_the_filter_leaves_the_rows_that_have_the_words(site: Path) -> None:
    with browser() as page:
        page.open(site / "en" / "reference" / "arguments.html")
        shown = "[...document.querySelectorAll('#arguments tbody tr')].filter(row => !row.hidden).length"
        everything = page.evaluate(shown)
        page.evaluate("document.getElementById('filter-arguments').focus()")
        page.call("Input.insertText", text="accumulate_grad_batches")
        assert everything > 60
        assert page.evaluate(shown) == 1


def wait_for(page: object, condition: str) -> None:
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)

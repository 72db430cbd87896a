"""The navigation holds each page."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
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

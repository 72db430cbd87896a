"""Pages and tables are marked by what they hold, so that the style sheet finds them without a search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from site_builder.page_layout import with_marked_layout

THEME = Path(__file__).parents[3] / "docs" / "site_builder" / "theme"


@pytest.mark.parametrize(
    ("content", "held"),
    [
        ("<p>text</p>", ""),
        ('<div class="side-by-side"></div>', 'data-holds="side-by-side" '),
        ('<div class="wide" markdown></div>', 'data-holds="wide" '),
        ('<h1 id="command-line">Command line</h1><div class="wide"></div>', 'data-holds="wide commands" '),
    ],
)
def test_a_page_is_marked_by_what_it_holds(content: str, held: str) -> None:
    page = '<body {}dir="ltr">{}</body>'
    assert with_marked_layout(page.format("", content)) == page.format(held, content)


@pytest.mark.parametrize(("columns", "mark"), [(6, ""), (7, ' data-columns="many"'), (8, ' data-columns="many"')])
def test_a_table_of_many_columns_is_marked(columns: int, mark: str) -> None:
    page = "<table>\n<thead>\n<tr>" + "<th>a</th>" * 2 + "</tr></thead></table><table{}>\n<thead>\n<tr>\n"
    page += '<th style="text-align: right;">a</th>\n' * columns + "</tr>\n</thead></table>"
    assert with_marked_layout(page.format("")) == page.format(mark)


def test_the_style_sheet_searches_no_page() -> None:
    """With `:has()` of all that an element holds, the largest page took 7 s in place of 1 s."""
    searches = re.findall(r":has\(([^()]*)", (THEME / "assets" / "site.css").read_text(encoding="utf-8"))
    assert all(each.startswith("> ") or each == "th:first-child:empty" for each in searches)

"""Each part that a page asks for is made, and each that is made has a page."""

from __future__ import annotations

import re
from pathlib import Path

from site_builder.from_code import MAKERS

PAGES = Path(__file__).parents[3] / "docs" / "en"


def test_each_maker_has_one_page() -> None:
    asked = [
        name
        for page in PAGES.rglob("*.md")
        for name in re.findall(r"^::: from-code: (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(asked) == sorted(MAKERS)

"""Checks the built site: links and anchors lead somewhere, and nothing is fetched from the network."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_FETCHED = {"canonical", "alternate", "prev", "next"}
"""Kinds of `<link>` that a browser does not fetch."""


class Page(HTMLParser):
    """The links of a page, and what links may lead to.

    Attributes:
        ids: Anchors of the page.
        links: Targets of its links.
        fetched: Addresses of its scripts, styles and pictures.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the anchor, the link or the address of a tag."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in _FETCHED and _FETCHED[tag] in given and given.get("rel") not in _NOT_FETCHED:
            self.fetched.append(given[_FETCHED[tag]])


def problems_of(site: Path) -> list[str]:
    """Return a sentence for each link of a built site that leads nowhere, and for each address that is not local."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        problems += [
            f"{name} fetches {address} from the network" for address in page.fetched if urlsplit(address).netloc
        ]
        for link in dict.fromkeys([*page.links, *page.fetched]):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not target.is_file():
                problems.append(f"{name} links to {link}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                problems.append(f"{name} links to {link}, but there is no such heading")
    return problems

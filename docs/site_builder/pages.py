"""The pages of one language: copied from `docs/`, with links to the site, and with the parts made from the code."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from site_builder import sources
from site_builder.includes import with_included_files

LANGUAGES = ("en", "ar")
_FENCED = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)#\s]*)(#[^)\s]*)?(?=\))")
_DRAWING = re.compile(r"^!\[[^\]]*\]\(([^)]+\.svg)\)$", re.MULTILINE)
_FROM_CODE = re.compile(r"^::: from-code: (.+)$", re.MULTILINE)


class Place(NamedTuple):
    """A page or a picture of the site: its language, and its path in the folder of that language."""

    language: str
    path: PurePosixPath


def place_of(file: Path, root: Path = sources.ROOT) -> Place | None:
    """Return where the site has a file or folder of the repository; None if it does not."""
    for language in LANGUAGES:
        if file.is_relative_to(folder := root / "docs" / language):
            return Place(language, PurePosixPath(file.relative_to(folder).as_posix()))
    page = sources.pages(root).get(file)
    return None if page is None else Place("en", page)


def with_links_to_the_site(text: str, origin: Path, place: Place, root: Path = sources.ROOT) -> str:
    """Return a page's text with its relative links led to the site.

    Args:
        text: The text, whose links are relative to `origin`.
        origin: File of the repository that holds the text.
        place: Place of the page on the site.
        root: Folder of the repository.

    Raises:
        ValueError: If a link leads to a file that is missing or not part of the site.
    """

    def led(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        file = Path(os.path.normpath(origin.parent / path))
        found = place_of(file, root) if file.exists() else None
        if found is None:
            raise ValueError(f"{origin.relative_to(root)} links to {path}, which is no page of the site; link to one")
        begin, end = place.path.parent, found.path
        if found.language != place.language:
            begin, end = place.language / begin, found.language / end.with_suffix(end.suffix.replace(".md", ".html"))
        return f"{PurePosixPath(os.path.relpath(end, begin))}{anchor}"

    return outside_of_code(text, lambda part: _LINK.sub(led, part))


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text whose parts outside of fenced code are changed."""
    parts, end = [], 0
    for block in _FENCED.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def with_drawings(text: str, folder: Path) -> str:
    """Return a page's text with its pictures in SVG written into it, so that they have the page's colours."""

    def drawn(picture: re.Match[str]) -> str:
        svg = (folder / picture[1]).read_text(encoding="utf-8").strip()
        return f'<figure class="plot">{svg}</figure>'

    return outside_of_code(text, lambda part: _DRAWING.sub(drawn, part))


def with_parts_from_the_code(text: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text with each line `::: from-code: NAME` replaced by what the maker of that name returns.

    Raises:
        ValueError: If there is no maker of a name.
    """

    def made(line: re.Match[str]) -> str:
        if line[1] not in makers:
            raise ValueError(f"'{line[0]}' names nothing that is made from the code; use one of {', '.join(makers)}")
        return makers[line[1]]().strip()

    return _FROM_CODE.sub(made, text)


def write_pages(
    language: str, folder: Path, makers: Mapping[str, Callable[[], str]], root: Path = sources.ROOT
) -> set[PurePosixPath]:
    """Write the pages and pictures of a language into a new folder, and return the paths of the pages.

    Raises:
        ValueError: If a link or a part from the code leads nowhere.
    """
    shutil.rmtree(folder, ignore_errors=True)
    begin = root / "docs" / language
    files = {path: PurePosixPath(path.relative_to(begin).as_posix()) for path in begin.rglob("*") if path.is_file()}
    if language == "en":
        files |= sources.made_pages(root)
    for origin, path in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = with_included_files(sources.markdown_of(origin, root), path.stem, root, language)
            text = with_drawings(text, origin.parent)
            text = with_links_to_the_site(text, origin, Place(language, path), root)
            target.write_text(with_parts_from_the_code(text, makers), encoding="utf-8")
        else:
            shutil.copyfile(origin, target)
    return {path for path in files.values() if path.suffix == ".md"}

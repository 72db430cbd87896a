"""Builds the site: writes the pages, runs the generator once for each language, and checks what came out."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from site_builder import api, search
from site_builder.check import problems_of
from site_builder.code_words import with_whole_words, without_gaps
from site_builder.completeness import missing
from site_builder.from_code import MAKERS
from site_builder.page_layout import with_marked_layout
from site_builder.pages import LANGUAGES, write_pages
from site_builder.sources import ROOT
from site_builder.text_blocks import with_marked_blocks

_HERE = Path(__file__).parent
_NAMES = {"en": "English", "ar": "العربية"}
_FRONT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>trainer_kit</title>
<meta http-equiv="refresh" content="0; url=en/index.html">
<link rel="canonical" href="en/index.html">
<a href="en/index.html">English</a> <a href="ar/index.html" lang="ar">العربية</a>
"""


def navigation(sections: list[dict[str, Any]], language: str, pages: set[PurePosixPath]) -> list[Any]:
    """Return the generator's navigation of a language, with links to the English sections that are not translated.

    Args:
        sections: The sections of `nav.yaml`.
        language: The language.
        pages: Paths of all pages of the language.

    Raises:
        ValueError: If a page is in no section, or an English page that a section names does not exist.
    """
    listed: set[PurePosixPath] = set()

    def entries(section: Mapping[str, Any]) -> list[Any]:
        folder = PurePosixPath(section.get("folder", ""))
        found = section["pages"]
        names = sorted(page.stem for page in pages if page.parent == folder) if found == "*" else found
        paths = [folder / f"{name}.md" for name in names]
        if language == "en" and (missing := [str(path) for path in paths if path not in pages]):
            raise ValueError(f"nav.yaml names {', '.join(missing)}, which docs/en lacks; write the page, or remove it")
        listed.update(paths)
        return [str(path) for path in paths if path in pages]

    made: list[Any] = []
    for section in sections:
        inner = entries(section)
        for group in section.get("groups", ()):
            if below := entries(group):
                inner.append({group["title"][language]: below})
        title, folder = section["title"][language], section.get("folder")
        if inner:
            made.append({title: inner if folder else inner[0]})
        else:  # not translated: the English section stands in
            made.append({f"{title} (EN)": f"../en/{folder}/index.html"})
    if others := sorted(map(str, pages - listed)):
        raise ValueError(f"nav.yaml lacks {', '.join(others)} of docs/{language}; add each to a section")
    return made


def settings(language: str, pages: Mapping[str, set[PurePosixPath]]) -> dict[str, Any]:
    """Return the generator's settings of a language."""
    text = (_HERE / "site.yaml").read_text(encoding="utf-8")
    text = text.replace("THEME", str(_HERE / "theme")).replace("ROOT", str(ROOT))
    made: dict[str, Any] = yaml.safe_load(text)
    sections = yaml.safe_load((_HERE / "nav.yaml").read_text(encoding="utf-8"))
    for palette in made["theme"]["palette"]:
        palette["toggle"]["name"] = palette["toggle"]["name"][language]
    for toc in (each["toc"] for each in made["markdown_extensions"] if "toc" in each):
        toc["permalink_title"] = toc["permalink_title"][language]
    facts = {
        "defaults": api.made_defaults(), "functions": api.names_of_modules(), "values": api.made_values(),
        "hints": api.plain_hints(), "enums": api.values_of_enums(),
    }  # fmt: skip
    python = next(each["mkdocstrings"] for each in made["plugins"] if "mkdocstrings" in each)["handlers"]["python"]
    python["options"]["extensions"] = ["dataclasses", {str(_HERE / "griffe_extension.py"): facts}]
    made["theme"]["language"] = language
    in_all = set.intersection(*pages.values())
    # A list under this name would make each page ask for the map of the other site, which a file must not.
    made["extra"]["alternate"] = True
    made["extra"]["languages"] = [{"code": code, "name": _NAMES[code]} for code in LANGUAGES]
    made["extra"]["translated"] = [str(page.with_suffix(".html")) for page in sorted(in_all)]
    return made | {
        "site_name": "trainer_kit",
        "docs_dir": f"pages/{language}",
        "site_dir": f"site/{language}",
        "nav": navigation(sections, language, pages[language]),
    }


def build(folder: Path) -> list[str]:
    """Build the site in `folder / "site"`, and return its problems.

    Raises:
        ValueError: If a page, a link or the navigation is wrong.
        subprocess.CalledProcessError: If the generator finds a problem; it prints it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "site", ignore_errors=True)
    pages = {language: write_pages(language, folder / "pages" / language, MAKERS) for language in LANGUAGES}
    for language in LANGUAGES:
        config = folder / f"{language}.yml"
        config.write_text(yaml.safe_dump(settings(language, pages), allow_unicode=True), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(config)]
        subprocess.run(command, check=True, timeout=600)
        (folder / "site" / language / "404.html").unlink()  # servers look for it in their root only
        search.rank(folder / "site" / language)
        search.ignore_marks(folder / "site" / language)
        for page in (folder / "site" / language).rglob("*.html"):
            text = with_whole_words(without_gaps(page.read_text(encoding="utf-8")), right_to_left=language == "ar")
            page.write_text(with_marked_layout(with_marked_blocks(text)), encoding="utf-8")
    (folder / "site" / "index.html").write_text(_FRONT, encoding="utf-8")
    return [*problems_of(folder / "site"), *missing(folder / "site")]


def main(arguments: list[str] | None = None) -> int:
    """Build the site and print where it is; return 1 if it has problems."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Builds the documentation site and checks it.")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "docs", help="folder, whose site/ becomes the site"
    )
    folder = parser.parse_args(arguments).output.resolve()
    try:
        problems = build(folder)
    except ValueError as error:
        problems = [str(error)]
    except subprocess.CalledProcessError:
        return 1
    for problem in problems:
        print(f"scripts/docs: {problem}", file=sys.stderr)
    if not problems:
        print(f"built {folder / 'site' / 'index.html'}")
    return int(bool(problems))

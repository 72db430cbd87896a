"""Pages are copied with links to the site, and with what is made from the code."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from site_builder.pages import (
    Place,
    place_of,
    with_drawings,
    with_links_to_the_site,
    with_parts_from_the_code,
    write_pages,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a page in each language, a script and a file that is no page."""
    files = {
        "docs/en/index.md": "[how](how-to/train.md#data) [script](../../examples/a.py) ![plot](plot.svg)\n",
        "docs/en/plot.svg": "<svg/>",
        "docs/en/how-to/train.md": "# Train\n\n## Data\n\n::: from-code: table\n\n```md\n[a](missing.md)\n```\n",
        "docs/ar/index.md": "[how](../en/how-to/train.md#data) [the web](https://a.b/c) [here](#data)\n",
        "examples/a.py": "print('[a](b)')\n",
        "setup.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"):
        (tmp_path / name).write_text("[page](docs/en/how-to/train.md)\n")
    return tmp_path


def test_a_page_of_the_repository_has_a_place_on_the_site(root: Path) -> None:
    assert place_of(root / "docs/ar/index.md", root) == Place("ar", PurePosixPath("index.md"))
    assert place_of(root / "examples/a.py", root) == Place("en", PurePosixPath("tutorials/scripts/a.md"))
    assert place_of(root / "setup.py", root) is None


def test_links_lead_to_the_site(root: Path) -> None:
    pages = write_pages("en", root / "out", {"table": lambda: "| made |"}, root)
    assert {str(page) for page in pages} == {
        "index.md", "how-to/train.md", "tutorials/scripts/a.md", "project/contributing.md", "project/changelog.md",
        "project/code-of-conduct.md", "project/security.md",
    }  # fmt: skip
    text = (root / "out/index.md").read_text()
    assert text == "[how](how-to/train.md#data) [script](tutorials/scripts/a.md) ![plot](plot.svg)\n"
    assert (root / "out/plot.svg").read_text() == "<svg/>"
    assert (root / "out/project/contributing.md").read_text() == "[page](../how-to/train.md)\n"


def test_a_link_to_the_other_language_leads_to_its_built_page(root: Path) -> None:
    write_pages("ar", root / "out", {}, root)
    text = (root / "out/index.md").read_text()
    assert text == "[how](../en/how-to/train.html#data) [the web](https://a.b/c) [here](#data)\n"


def test_code_stays_as_it_is(root: Path) -> None:
    write_pages("en", root / "out", {"table": lambda: "| made |"}, root)
    assert "[a](missing.md)" in (root / "out/how-to/train.md").read_text()
    assert "print('[a](b)')" in (root / "out/tutorials/scripts/a.md").read_text()


@pytest.mark.parametrize("target", ["missing.md", "../../setup.py"])
def test_a_link_that_leads_nowhere_is_refused(target: str, root: Path) -> None:
    page = root / "docs/en/index.md"
    with pytest.raises(ValueError, match=rf"docs/en/index.md links to {target}, which is no page of the site"):
        with_links_to_the_site(f"[a]({target})", page, Place("en", PurePosixPath("index.md")), root)


def test_parts_are_made_from_the_code() -> None:
    assert with_parts_from_the_code("a\n\n::: from-code: b\n", {"b": lambda: "made\n"}) == "a\n\nmade\n"
    with pytest.raises(ValueError, match="'::: from-code: c' names nothing that is made from the code; use one of b"):
        with_parts_from_the_code("::: from-code: c", {"b": lambda: ""})


def test_a_drawing_is_written_into_the_page(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg></svg>\n")
    text = "![A plot](a.svg)\n\n```md\n![A plot](a.svg)\n```\n"
    drawn = '<figure class="plot"><svg></svg></figure>\n\n```md\n![A plot](a.svg)\n```\n'
    assert with_drawings(text, tmp_path) == drawn

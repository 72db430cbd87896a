"""Files of the repository outside of `docs/` that are pages of the site too, and the Markdown of their pages."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
_SCRIPTS = PurePosixPath("tutorials/scripts")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh"}

# Files and folders whose content has a page of another name.
_STAND_INS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "SECURITY.md": "project/security.md",
    "examples": "tutorials/index.md",
    "trainer_kit/config/arguments.py": "reference/arguments.md",
    "trainer_kit/errors.py": "reference/exceptions.md",
}
_MIGRATIONS = "examples/coming_from"
_COPIED = ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")


def scripts(root: Path = ROOT) -> dict[Path, PurePosixPath]:
    """Return the page of each script, notebook and guide in `examples/`, by file; migrations have no own pages."""
    suffixes = {*_LANGUAGES, ".ipynb", ".md"}
    files = sorted(path for path in (root / "examples").rglob("*") if path.suffix in suffixes)
    files = [path for path in files if path.parent != root / _MIGRATIONS]
    pages = {path: _SCRIPTS / f"{path.stem}.md" for path in files}
    if len({*pages.values()}) < len(pages):
        raise ValueError("two files in examples/ have the same name; rename one, since their pages would be the same")
    return pages


def migrations(root: Path = ROOT) -> dict[Path, PurePosixPath]:
    """Return the page that shows each script `PEER_before.py` and `PEER_after.py`, by file."""
    files = sorted((root / _MIGRATIONS).glob("*.py"))
    return {path: PurePosixPath("coming-from") / f"{path.stem.rpartition('_')[0]}.md" for path in files}


def pages(root: Path = ROOT) -> dict[Path, PurePosixPath]:
    """Return the English page that each file or folder outside of `docs/` has on the site."""
    stand_ins = {root / path: PurePosixPath(page) for path, page in _STAND_INS.items()}
    return stand_ins | migrations(root) | scripts(root)


def made_pages(root: Path = ROOT) -> dict[Path, PurePosixPath]:
    """Return the pages that are made from files outside of `docs/`, by file."""
    return {path: page for path, page in pages(root).items() if path.name in _COPIED} | scripts(root)


def markdown_of(path: Path, root: Path = ROOT) -> str:
    """Return the text of the page that shows a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    title = f"# {path.name}\n"
    if path.suffix == ".ipynb":
        return "\n\n".join([title, *map(_cell, json.loads(text)["cells"])]) + "\n"
    return f'{title}\n````{_LANGUAGES[path.suffix]} title="{path.relative_to(root).as_posix()}"\n{text}````\n'


def _cell(cell: dict[str, object]) -> str:
    source = cell["source"]
    text = "".join(source) if isinstance(source, list) else str(source)
    if cell["cell_type"] == "code":
        return f"````python\n{text.rstrip()}\n````"
    title, below, rest = text.removeprefix("# ").partition("\n")
    return f"**{title}**{below}{rest}".replace("\n# ", "\n## ") if text.startswith("# ") else text

"""Scripts and notebooks of the repository are pages of the site."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_builder import sources


def test_each_script_has_a_page_that_shows_it() -> None:
    pages = sources.scripts()
    scripts = [path for path in pages if path.suffix == ".py"]
    assert len(scripts) > 10
    for path in scripts:
        assert path.read_text() in sources.markdown_of(path)


def test_a_notebook_is_a_page_of_its_cells() -> None:
    [path] = [path for path in sources.scripts() if path.name == "notebook.ipynb"]
    text = sources.markdown_of(path)
    assert text.startswith("# notebook.ipynb\n")
    assert "````python\n" in text
    assert text.count("\n# ") == 0
    assert "\n**Training on several processes from a notebook**\n" in text


def test_two_scripts_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.py", "a.md"):
        (tmp_path / "examples").mkdir(exist_ok=True)
        (tmp_path / "examples" / name).touch()
    with pytest.raises(ValueError, match="two files in examples/ have the same name"):
        sources.scripts(tmp_path)


def test_a_migration_is_shown_by_the_page_of_its_peer() -> None:
    folder = sources.ROOT / "examples" / "coming_from"
    shown = sources.migrations()
    assert {str(shown[folder / f"lightning_{part}.py"]) for part in ("before", "after")} == {"coming-from/lightning.md"}
    assert {path for path in folder.glob("*.py") if path not in sources.pages()} == set()
    assert sources.scripts().keys().isdisjoint(shown)
    for path, page in shown.items():
        assert f"\n::: code: {path.relative_to(sources.ROOT)}\n" in (sources.ROOT / "docs" / "en" / page).read_text()

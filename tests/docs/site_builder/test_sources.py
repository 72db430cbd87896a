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


def test_two_scripts_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a.py", "a.md"):
        (tmp_path / "examples").mkdir(exist_ok=True)
        (tmp_path / "examples" / name).touch()
    with pytest.raises(ValueError, match="two files in examples/ have the same name"):
        sources.scripts(tmp_path)

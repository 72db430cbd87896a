"""Parts of a page that are files: code of a script, and what the page's commands wrote when they were recorded."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from site_builder.plots import plot_in
from site_builder.sources import ROOT

_LINE = re.compile(r"^::: (code|output|plot): (.+)$", re.MULTILINE)

_COMMAND = re.compile(r"^\s*[%!]", re.MULTILINE)
"""A line of a notebook that is no Python, such as `%pip install`."""


def with_included_files(text: str, page: str, root: Path = ROOT, language: str = "en") -> str:
    """Return a page's text with its lines that include a file replaced by what they stand for.

    - `::: code: PATH` stands for a script, `::: code: PATH NAME ...` for these definitions of a script or notebook.
    - `::: output: NAME` stands for what the command above it printed.
    - `::: plot: RUN_DIR PANEL` stands for a plot of the report of a run that the page's commands made,
      `::: plot: RUN_DIR+RUN_DIR PANEL` for one that compares two runs, `::: plot: NAME.txt memory` for the memory of a
      step that a recorded output shows.

    Args:
        text: The text.
        page: Name of the page, without folder and suffix.
        root: Folder of the repository.
        language: Language of the page, for the words of plots.

    Raises:
        ValueError: If a file, a definition or the translation of a plot's word is missing.
    """

    def included(line: re.Match[str]) -> str:
        kind, words = line[1], line[2].split()
        if kind == "code":
            return _code(words[0], words[1:], root)
        path = recorded_file(page, plot_name(*words) if kind == "plot" else f"{words[0]}.txt", root)
        if not path.is_file():
            raise ValueError(f"'{line[0]}' of {page}.md is not recorded; run scripts/tutorials {page}")
        content = path.read_text(encoding="utf-8").rstrip("\n")
        return plot_in(language, content) if kind == "plot" else f"````text\n{content}\n````"

    return _LINE.sub(included, text)


def recorded_file(page: str, name: str, root: Path = ROOT) -> Path:
    """Return the file that keeps an output or a plot of a page."""
    return root / "docs" / "recorded" / page / name


def plot_name(run_dir: str, panel: str) -> str:
    """Return the name of the file that keeps a plot."""
    return f"{run_dir}-{panel}.svg".replace("/", "-").replace("+", "-")


def _code(path: str, names: Sequence[str], root: Path) -> str:
    source = (root / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        cells = ["".join(cell["source"]) for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]
        source = "\n\n".join(cell for cell in cells if not _COMMAND.search(cell))
    shown = "\n\n\n".join(definition(source, name) for name in names) if names else source.rstrip("\n")
    return f'````python title="{path}"\n{shown}\n````'


def definition(source: str, name: str) -> str:
    """Return the lines of a definition in Python source.

    Args:
        source: The source of a module.
        name: Name of a class, function or variable; dots lead inwards, as in `LabelCheck.metrics` or `train.args`.

    Raises:
        ValueError: If there is no such definition.
    """
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [each for each in getattr(node, "body", ()) if part in _names(each)]
        if not found:
            raise ValueError(f"'::: code' names {name}, which the script does not define")
        node = found[0]
    assert isinstance(node, ast.stmt)
    decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
    lines = source.splitlines()[min([node.lineno, *decorators]) - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}

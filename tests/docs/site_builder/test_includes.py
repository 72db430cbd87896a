"""Lines of a page stand for code of a script and for what its commands wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from site_builder.includes import definition, with_included_files

SCRIPT = '''"""Doc."""

SIZES = (1, 2)


@cached
def make(
    a,
):
    args = Arguments(
        x=1,
    )
    return args


class Model:
    def forward(self):
        """Run."""
        return 0
'''


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SIZES", "SIZES = (1, 2)"),
        ("make", "@cached\ndef make(\n    a,\n):\n    args = Arguments(\n        x=1,\n    )\n    return args"),
        ("make.args", "args = Arguments(\n    x=1,\n)"),
        ("Model.forward", 'def forward(self):\n    """Run."""\n    return 0'),
    ],
)
def test_a_definition_is_found_by_its_name(name: str, expected: str) -> None:
    assert definition(SCRIPT, name) == expected


@pytest.mark.parametrize("name", ["other", "make.other", "SIZES.make"])
def test_a_definition_that_is_missing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"names {name}, which the script does not define"):
        definition(SCRIPT, name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a script, a notebook and the recorded files of a page."""
    cells = [
        {"cell_type": "markdown", "source": ["text"]},
        {"cell_type": "code", "source": ["if True:\n", "    %pip install a"]},
        {"cell_type": "code", "source": ["a = 1\n", "b = 2"]},
    ]
    files = {
        "examples/a.py": SCRIPT,
        "examples/b.ipynb": json.dumps({"cells": cells}),
        "docs/recorded/first/train.txt": "loss 1\n",
        "docs/recorded/first/runs-a-loss.svg": "<figure><svg/></figure>\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_lines_are_replaced_by_files(root: Path) -> None:
    text = "A\n\n::: code: examples/a.py SIZES Model.forward\n\n::: output: train\n\n::: plot: runs/a loss\n"
    code = 'SIZES = (1, 2)\n\n\ndef forward(self):\n    """Run."""\n    return 0'
    assert with_included_files(text, "first", root) == (
        f'A\n\n````python title="examples/a.py"\n{code}\n````\n\n````text\nloss 1\n````\n\n<figure><svg/></figure>\n'
    )
    whole = with_included_files("::: code: examples/a.py\n", "first", root)
    assert whole == f'````python title="examples/a.py"\n{SCRIPT}````\n'
    assert "\nb = 2\n" in with_included_files("::: code: examples/b.ipynb b", "first", root)


def test_what_is_not_recorded_is_refused(root: Path) -> None:
    for line in ("::: output: other", "::: plot: runs/a other"):
        with pytest.raises(ValueError, match=rf"'{line}' of first.md is not recorded; run scripts/tutorials first"):
            with_included_files(line, "first", root)

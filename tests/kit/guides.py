"""What the guides' own tests share: a guide's commands and sentences, and what the sources say."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import trainer_kit
import trainer_kit.callbacks
from trainer_kit.cli.main import main


class Guide:
    """A page of the documentation.

    Attributes:
        text: All of it.
        shell: What stands in its blocks of shell commands.
        python: What stands in its blocks of Python.
        commands: The commands `trainer-kit launch … train.py`, without "trainer-kit".
        sentences: The first column of its tables of messages; "…" stands for what is filled in.
    """

    def __init__(self, path: str) -> None:
        self.text = (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
        self.shell, self.python = (
            re.findall(rf"```{kind}\n(.*?)```", self.text, re.DOTALL) for kind in ("sh", "python")
        )
        joined = re.sub(r"\\?\n", " ", self.text)
        self.commands = re.findall(r"trainer-kit (launch [^`]*? train\.py)", joined)
        self.sentences = re.findall(r"^\| `(.*?)` \|", self.text, re.MULTILINE)


def dry_run(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What `command` would start, a line each, in a folder that holds the script and no settings."""
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    assert main([*command.replace("launch", "launch --dry-run").split()]) == 0
    return capsys.readouterr().out.splitlines()


def unsaid(sentence: str) -> list[str]:
    """The parts of a guide's sentence that stand nowhere in the sources."""
    texts = _texts()
    parts = [part.strip(" ()") for part in sentence.split("…")]
    return [part for part in parts if not any(part in text for text in texts)]


@functools.cache
def _texts() -> list[str]:
    """The texts in the sources, what is filled into them left out."""
    folders = [Path(package.__file__).parent for package in (trainer_kit, trainer_kit.callbacks)]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in folders for path in folder.rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [piece for text in texts if isinstance(text, str) for piece in text.split("%s")]

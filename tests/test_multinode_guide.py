"""What examples/multinode.md tells is so: its commands are taken, its sentences are ours."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trainer_kit
import trainer_kit.callbacks
from trainer_kit.cli.main import main

GUIDE = Path(__file__).parent.parent / "examples" / "multinode.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"trainer-kit (launch --num-nodes .*? train\.py)", TEXT.replace("\\\n", " "))
SENTENCES = re.findall(r"^\| `(.*?)` \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_launcher_takes_the_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, value in {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "node1"}.items():
        command = command.replace(f'"${name}"', value)
    assert main([*command.replace("launch", "launch --dry-run --cpu").split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all("WORLD_SIZE=16" in line and "MASTER_ADDR=node1 MASTER_PORT=29500" in line for line in lines)


def test_there_are_commands_and_sentences() -> None:
    assert (len(COMMANDS), len(BLOCKS), len(SENTENCES)) == (3, 5, 11)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("block", BLOCKS)
def test_bash_reads_the_files(block: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=30, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentences_are_said(sentence: str) -> None:
    parts = [part.strip(" ()") for part in sentence.split("…")]
    said = _texts()
    for part in parts:
        assert any(part in text for text in said), part


def _texts() -> list[str]:
    """The texts in the sources, what is filled into them left out."""
    folders = [Path(package.__file__).parent for package in (trainer_kit, trainer_kit.callbacks)]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in folders for path in folder.rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [piece for text in texts if isinstance(text, str) for piece in text.split("%s")]

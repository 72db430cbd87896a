"""What examples/multinode.md tells is so: its commands are taken, its sentences are ours."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kit.guides import Guide, dry_run, unsaid

GUIDE = Guide("examples/multinode.md")
COMMANDS = [command for command in GUIDE.commands if "--num-nodes" in command]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_launcher_takes_the_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "node1"}.items():
        command = command.replace(f'"${name}"', value)
    lines = dry_run(command.replace("launch", "launch --cpu"), tmp_path, monkeypatch, capsys)
    assert len(lines) == 8
    assert all("WORLD_SIZE=16" in line and "MASTER_ADDR=node1 MASTER_PORT=29500" in line for line in lines)


def test_there_are_commands_and_sentences() -> None:
    assert (len(COMMANDS), len(GUIDE.shell), len(GUIDE.sentences)) == (5, 7, 11)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("block", GUIDE.shell)
def test_bash_reads_the_files(block: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=30, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("sentence", GUIDE.sentences)
def test_the_sentences_are_said(sentence: str) -> None:
    assert not unsaid(sentence)

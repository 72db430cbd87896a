"""README and guide hold what they promise: links lead somewhere, commands and arguments exist, the script trains."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.guides import Guide, dry_run

from trainer_kit import TrainingArguments, errors

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("examples/*.md")]
README, GUIDE = Guide("README.md"), Guide("docs/en/how-to/train.md")
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in headings(target), f"{path}#{anchor}"


@pytest.mark.parametrize("command", sorted({*README.commands, *GUIDE.commands}))
def test_the_launcher_takes_the_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(command.replace("launch", "launch --cpu"), tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("field", "kind"), [("optim", "Optimizers"), ("lr_scheduler_type", "Schedules")])
def test_every_optimizer_and_schedule_is_named(field: str, kind: str) -> None:
    with pytest.raises(ValueError, match="must be one of") as raised:
        TrainingArguments(**{field: "unknown"})  # type: ignore[arg-type]
    allowed = set(re.findall(r"'(\w+)'", str(raised.value).partition("must be one of")[2]))
    section = GUIDE.text.partition(f"### {kind} by name")[2].partition("\n##")[0]
    assert len(allowed) > 5
    assert allowed <= {name for pair in re.findall(r'`(\w+)`|"(\w+)"', section) for name in pair}


def test_the_arguments_are_ours() -> None:
    table = GUIDE.text.partition("## Arguments")[2].partition("## ")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "`" in row]
    values = {"bf16", "fp16", "fp8", "stop", "skip", "rollback", "ignore"}
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(rows) == 7
    assert named - FIELDS == values
    calls = [
        node
        for block in (*README.python, *GUIDE.python)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TrainingArguments"
    ]
    assert len(calls) == 7
    for call in calls:
        TrainingArguments(**{each.arg or "": ast.literal_eval(each.value) for each in call.keywords})


def test_every_exception_has_the_base_that_is_named() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    assert all(issubclass(kind, errors.TrainerKitError) for kind in kinds)


@pytest.mark.scenario
def test_the_script_trains_and_resumes(tmp_path: Path) -> None:
    [script] = README.python
    assert len(script.splitlines()) < 30
    (tmp_path / "train.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for start in ("no checkpoint in ", "resumed from "):
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert start in done.stderr
        result, metrics = done.stdout.splitlines()
        assert result.startswith("TrainOutput(global_step=375, training_loss=0.1")
        assert ast.literal_eval(metrics)["eval_loss"] < 0.2

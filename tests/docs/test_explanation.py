"""The pages of the explanation: their examples print what they show, their figures are those of the code."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.guides import Guide

from trainer_kit import DDP
from trainer_kit.profiling.time_ledger import LOST
from trainer_kit.strategies.process_group import SLOW_SECONDS, default_patience
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat
from trainer_kit.strategies.watchdog.peers import Beat, PeerTable

ROOT = Path(__file__).parents[2]
PAGES = ("loss", "resuming", "checkpoints", "heartbeat", "comparison")
GUIDES = {page: Guide(f"docs/en/explanation/{page}.md") for page in PAGES}
EXAMPLE = re.compile(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(code, shown, id=f"{page} {number}")
    for page, guide in GUIDES.items()
    for number, (code, shown) in enumerate(EXAMPLE.findall(guide.text))
]


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(("code", "shown"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(code: str, shown: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_each_example_is_run() -> None:
    blocks = [block for guide in GUIDES.values() for block in guide.python]
    assert len(EXAMPLES) == len(blocks) == 5


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    text = re.sub(r"```.*?```", "", GUIDES[page].text, flags=re.DOTALL)
    assert 500 <= len(text.split()) <= 1000


def test_the_seconds_of_the_heartbeat_are_those_of_the_code() -> None:
    parameters = inspect.signature(Heartbeat).parameters
    interval, patience = parameters["interval"].default, parameters["patience"].default
    text = " ".join(GUIDES["heartbeat"].text.split())
    assert default_patience() == patience
    assert f"does not answer for {patience:g} seconds (`heartbeat_timeout`) is lost" in text
    assert f"{patience / 2:g} s: looks every second" in text
    assert f"{patience:g} s: lost; {patience + interval:g} s: exit" in text
    assert interval == 5
    assert "Five seconds after a loss is known" in text
    assert f"After {SLOW_SECONDS:g} seconds without progress" in text
    minutes = inspect.signature(DDP).parameters["ddp_timeout"].default / 60
    assert f"by default {minutes:g} minutes" in text


def test_the_message_of_the_heartbeat_is_the_one_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, now = PeerTable(rank=0, patience=30.0), time.monotonic()
    beat = Beat(1, "gpu3", 1, 4712, "all_reduce", True, 0.0, False, "", False, False)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    peers.take_in({1: json.dumps(beat).encode()}, b"")
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    peers.take_in({1: json.dumps(beat).encode()}, b"")
    [problem] = peers.problems()
    assert f"```text\n{problem.text}\n```" in GUIDES["heartbeat"].text


def test_the_names_in_the_ledger_are_those_of_the_page() -> None:
    assert f"`seconds/{LOST}`" in GUIDES["checkpoints"].text

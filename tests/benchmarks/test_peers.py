"""The comparison with peers is one of equal trainings, and what is slower is named."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = ("step", "start", "memory", "device_memory", "stall", "stored", "resume")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("peers")


def figures(step: float = 1.0, losses: tuple[float, ...] = (2.0, 1.0), **others: Any) -> dict[str, Any]:
    return dict.fromkeys(KEYS, 1.0) | {"step": step, "losses": losses, "is_exact": True, "device_memory": 0} | others


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("preloaded_python")
def test_all_contenders_compute_the_same_losses(tmp_path: Path) -> None:
    page = (BENCHMARKS.parent / "docs" / "en" / "explanation" / "performance.md").read_text(encoding="utf-8")
    path = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--quick", "--json", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=880, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    for rounds in found["rounds"].values():
        assert {"plain", "trainer_kit", "transformers", "accelerate"} <= {*rounds}
        expected = rounds["plain"][0]["losses"]
        assert expected[0] != expected[-1]
        for each in rounds.values():
            assert each[0]["losses"] == pytest.approx(expected, rel=1e-4)
        assert rounds["trainer_kit"][0]["is_exact"]
    assert found["calls"]["trainer_kit"] > 0
    assert "| trainer_kit |" in done.stdout
    assert (BENCHMARKS.parent / "docs" / "en" / "explanation" / "performance.md").read_text(encoding="utf-8") == page


def test_another_loss_is_an_error(peers: ModuleType) -> None:
    same = {"MLP": {"plain": [figures()], "trainer_kit": [figures(losses=(2.0, 1.00001))]}}
    assert peers.check_losses(same) == pytest.approx(1e-5)
    for losses in [(2.0, 1.1), (2.0,), (2.0, float("nan"))]:
        with pytest.raises(ValueError, match="trainer_kit computes other losses of MLP"):
            peers.check_losses({"MLP": {"plain": [figures()], "trainer_kit": [figures(losses=losses)]}})


def test_what_is_slower_than_a_peer_is_named(peers: ModuleType) -> None:
    results = {
        "MLP": {
            "plain": [figures(1.0), figures(2.0), figures(1.0)],
            "trainer_kit": [figures(1.2), figures(2.4), figures(1.2)],
            "accelerate": [figures(1.5), figures(3.0), figures(1.5)],
        }
    }
    assert peers.slower(results) == ["- MLP, a step: 1.20, more than plain loop (1.00)."]
    results["MLP"]["trainer_kit"] = [figures(0.9), figures(1.8), figures(0.9)]
    assert peers.slower(results) == []


def test_the_tables_hold_ratios_of_the_same_round(peers: ModuleType) -> None:
    rounds = {"plain": [figures(1.0), figures(4.0)], "trainer_kit": [figures(1.5), figures(6.0, is_exact=False)]}
    lines = peers.tables({"MLP": rounds}, {"plain": 100.0, "trainer_kit": 90.0}).splitlines()
    row = next(line for line in lines if line.startswith("| trainer_kit"))
    assert row.startswith("| trainer_kit | 1.50 |")
    assert row.endswith("| no |")
    assert "| trainer_kit | 90 | 0.90 |" in lines
    assert "GPU" not in lines[0]


@pytest.mark.slow
def test_the_plot_is_drawn(peers: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers.draw({"MLP": {name: [figures()] for name in ("plain", "trainer_kit", "lightning")}}, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('<text y="') == 2 * 6  # of each measure its title and the one task
    assert "Lightning</text>" in drawn


def test_a_part_of_the_page_is_replaced(peers: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nafter\n")
    for _ in range(2):
        peers.replace_part("peers", r"new \1", page)
        assert page.read_text() == "before\n<!-- peers: begin -->\n\nnew \\1\n\n<!-- peers: end -->\nafter\n"
    with pytest.raises(ValueError, match="no part marked <!-- other: begin -->"):
        peers.replace_part("other", "new", page)

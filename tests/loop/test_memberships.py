"""Notes of who trains, and the closing line; real losses are in tests/scenarios/test_elastic.py."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.callbacks import read_log
from trainer_kit.loop import memberships
from trainer_kit.loop.memberships import closing_line, note_regroup, note_start
from trainer_kit.profiling.memberships import Members
from trainer_kit.profiling.time_ledger import Ledger


class Together:
    """Collectives of a run of which each machine has one process."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.world_size = len(hosts)

    def gather_object(self, value: Any) -> list[Any]:
        _, (_, launcher) = value
        return [(node, (host, launcher)) for node, host in enumerate(self.hosts)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRAINER_KIT_MEMBERSHIP", "launch/1/0/0")
    run: Any = SimpleNamespace(ledger=Ledger(), strategy=SimpleNamespace(collectives=Together("a", "b", "c")))
    note_start(run)
    return run


def test_a_run_that_lost_nothing_has_no_closing_line(run: Any) -> None:
    assert closing_line(run) is None


def test_the_closing_line_has_all_figures(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_MEMBERSHIP", "launch/2/1/0")
    run.strategy.collectives = Together("a", "c")
    note_regroup(run, "a connection broke", pause=1.0, again=1)
    run.ledger.memberships.steps_again += 5
    run.strategy.collectives = Together("b", "c", "d")
    note_regroup(run, "", pause=40.0, again=0)
    run.ledger._seconds |= {"forward": 989.0, "regroup": 11.0}
    run.ledger._missing |= {"forward": 4.0}
    line = closing_line(run)
    assert line == (
        "finished: 2 machines lost, 1 came again, 1 joined, 41 s of regrouping, 6 steps done again, "
        "0.4 % of the machines' time missing; goodput 98.5 %"
    )


def test_the_machines_of_a_fixed_launch_are_counted_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    run: Any = SimpleNamespace(strategy=SimpleNamespace(collectives=SimpleNamespace(world_size=6)))
    assert memberships.present_members(run) == Members(3, 6)


def train(folder: Path, steps: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "report_to": "jsonl"}
    args = arguments(folder, max_steps=steps, log_level="info", **saves)
    samples = [{"x": torch.ones(4), "labels": torch.tensor(0)} for _ in range(80)]
    metrics = Trainer(Linear(), args, samples).train(True).metrics
    return metrics, [record for record in read_log(folder / "run/log.jsonl") if record["event"] == "membership"]


def test_a_run_that_stays_as_it_is_shows_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2)
    metrics, changes = train(tmp_path, 4)
    assert changes == []
    assert not any(re.search("machine|membership|reduced|slowest|again", name) for name in metrics)
    assert "finished: " not in caplog.text


def test_a_resume_under_another_number_of_processes_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(memberships, "present_members", lambda run: Members(2, 4))
        train(tmp_path, 2)
    metrics, (change,) = train(tmp_path, 4)
    assert (change["step"], change["number"], change["processes_before"], change["machines_before"]) == (2, 2, 4, 2)
    assert (change["processes"], change["machines"], change["lost"], change["in_process"]) == (1, 1, [], False)
    assert 0 <= change["pause"] < 60
    assert (metrics["memberships"], metrics["machines_lost"], metrics["reduced_seconds"]) == (2, 0, 0.0)
    assert "finished: " not in caplog.text, "no machine was lost"

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kit.run_logs import BEGIN, RunLog, eventful, finished

from trainer_kit.report.history import RunHistory
from trainer_kit.report.timeline import Timeline


def made_by_hand(folder: Path) -> Timeline:
    """100 s setup, 100 s of work, 100 s that are lost, 300 s down, 50 s setup, 100 s of work, 20 s of evaluation."""
    log = RunLog(folder)
    log.time = BEGIN + 100
    log.write("start", began=BEGIN)
    log.step, log.time = 10, BEGIN + 200
    log.write("log", loss=1.0, **{"seconds/forward": 30.0, "seconds/backward": 70.0})
    log.step, log.time = 20, BEGIN + 280
    log.write("log", loss=1.0, **{"seconds/forward": 25.0, "seconds/backward": 55.0})
    log.step, log.time = 21, BEGIN + 300
    log.write("evaluate", eval_loss=1.0)
    log.step, log.time = 10, BEGIN + 650
    log.write("start", began=BEGIN + 600)
    log.step, log.time = 20, BEGIN + 750
    log.write("log", loss=1.0, **{"seconds/forward": 30.0, "seconds/data": 40.0, "seconds/callback/Progress": 10.0})
    log.time = BEGIN + 770
    totals = {"forward": 60.0, "backward": 70.0, "data": 40.0, "callback/Progress": 10.0, "evaluation": 20.0}
    totals |= {"setup": 150.0, "lost": 100.0, "down": 300.0, "loop": 20.0}
    log.write("log", train_runtime=170.0, **{f"seconds/{name}": value for name, value in totals.items()})
    log.write("end")
    return Timeline(RunHistory(folder))


def test_every_second_is_in_its_place(tmp_path: Path) -> None:
    timeline = made_by_hand(tmp_path)
    assert timeline.length == pytest.approx(770)
    edges, shares = timeline.shares(77)  # of ten seconds each
    assert edges[-1] == pytest.approx(770)

    def expect(name: str, *spans: tuple[int, int, float]) -> None:
        expected = np.zeros(77)
        for begin, end, share in spans:
            expected[begin // 10 : end // 10] = share
        np.testing.assert_allclose(shares.pop(name), expected, atol=1e-9)

    expect("setup", (0, 100, 1.0), (600, 650, 1.0))
    expect("forward", (100, 200, 0.3), (650, 750, 0.3))
    expect("backward", (100, 200, 0.7))
    expect("data", (650, 750, 0.4))
    expect("logging and callbacks", (650, 750, 0.1))
    expect("not recorded", (650, 750, 0.2))
    expect("lost", (200, 300, 1.0))
    expect("down", (300, 600, 1.0))
    expect("evaluation", (750, 770, 0.5))  # of the 20 s the summary counts as much as "loop"
    expect("loop", (750, 770, 0.5))
    assert shares == {}


def test_what_is_drawn_is_named(tmp_path: Path) -> None:
    timeline = made_by_hand(tmp_path)
    shown = timeline.shown_totals()
    assert shown["lost"] == pytest.approx(100 / 770)
    assert shown["not recorded"] == 0  # drawn, though the summary has it under other names
    assert shown.keys() >= timeline.shares(77)[1].keys()


def test_what_is_said_of_it(tmp_path: Path) -> None:
    timeline = made_by_hand(tmp_path)
    assert timeline.wall == 770
    assert timeline.goodput == pytest.approx(130 / 770)
    assert timeline.table().body[0] == ["down", "5 min", "39 %"]
    assert [(mark.kind, mark.second, mark.step) for mark in timeline.marks] == [("restart", 600.0, 10)]
    told = timeline.description()
    assert told.startswith("Wall time of 12 min 50 s, most of it on down 39 %, setup 19.5 %, lost 13 % and backward")
    assert "A restart 10 min after the beginning, resuming from step 10." in told


@pytest.mark.parametrize("make", [finished, eventful])
@pytest.mark.parametrize("columns", [7, 215])
def test_shares_fill_the_time_and_no_more(tmp_path: Path, make: object, columns: int) -> None:
    timeline = Timeline(RunHistory(make(tmp_path)))  # type: ignore[operator]
    _, shares = timeline.shares(columns)
    np.testing.assert_allclose(np.sum([*shares.values()], axis=0), 1.0, atol=0.01)
    assert min(share.min() for share in shares.values()) >= 0


def test_a_run_that_was_killed_is_counted_by_its_records(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.train(100)
    timeline = Timeline(RunHistory(tmp_path))
    assert timeline.totals["setup"] == pytest.approx(12)
    assert timeline.wall == pytest.approx(timeline.length)
    for name in ("forward", "callback/TensorBoard"):
        assert timeline.totals[name] == pytest.approx(log.totals[name])


def test_a_rollback_is_marked_and_what_it_took_is_lost(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.train(100)
    kept = log.time
    log.train(150)
    lost = log.time - kept
    log.step = 100
    log.write("rollback")
    log.train(150)
    log.write("end")
    timeline = Timeline(RunHistory(tmp_path))
    assert [mark.kind for mark in timeline.marks] == ["rollback"]
    assert timeline.totals["lost"] == pytest.approx(lost)


def test_logs_without_a_ledger_have_none(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.write("log", loss=1.0)
    assert not Timeline.exists(RunHistory(tmp_path))
    log.write("log", loss=1.0, **{"seconds/forward": 1.0})
    assert Timeline.exists(RunHistory(tmp_path))
    written = log.path.read_text()
    log.write("log", time="nan", **{"seconds/forward": 1.0})
    assert not Timeline.exists(RunHistory(tmp_path))
    log.path.write_text(written.replace(f'"time": {log.time}', '"time": "nan"', 1))  # of the start
    assert not Timeline.exists(RunHistory(tmp_path))


def test_a_clock_that_was_set_back_breaks_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.train(50)
    log.time -= 1000
    log.train(100)
    log.start()
    log.train(120)
    log.end()
    _, shares = Timeline(RunHistory(tmp_path)).shares(50)
    assert min(share.min() for share in shares.values()) >= 0

"""Machines over time, from logs of runs that never took place."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.run_logs import BEGIN, RunLog, elastic, eventful

from trainer_kit.report import drawing, write_report
from trainer_kit.report.history import RunHistory
from trainer_kit.report.machine_band import MachineBand, Span

FEWER = {"machines": 2, "machines_before": 3, "processes": 16, "processes_before": 24, "lost": ["c"], "joined": []}
MORE = {"machines": 3, "machines_before": 2, "processes": 24, "processes_before": 16, "lost": [], "joined": ["c"]}


def band(folder: Path) -> MachineBand:
    """200 s with 3 machines, 10 s to regroup, 100 s with 2, 50 s down, 40 s with 3, of which 20 s are setup."""
    log = RunLog(folder)
    log.time = BEGIN + 20
    log.write("start", began=BEGIN)
    log.step, log.time = 10, BEGIN + 210
    log.write("membership", number=2, pause=10.0, again=1, in_process=True, cause="rank 2 was lost", **FEWER)
    log.step, log.time = 20, BEGIN + 310
    log.write("end")
    log.time = BEGIN + 380
    log.write("start", began=BEGIN + 360)
    log.write("membership", number=3, pause=70.0, again=0, in_process=False, cause="", **MORE)
    log.step, log.time = 30, BEGIN + 400
    log.write("end")
    return MachineBand(RunHistory(folder))


def test_each_second_has_its_machines(tmp_path: Path) -> None:
    found = band(tmp_path)
    assert (found.noun, found.full, found.length) == ("machine", 3, 400)
    expected = [Span(0, 200, 3), Span(200, 210, 0), Span(210, 310, 2), Span(310, 360, 0), Span(360, 400, 3)]
    assert found.spans == expected
    assert found.missing == pytest.approx(100 / 3 / 400)


def test_it_is_described_in_words_and_a_table(tmp_path: Path) -> None:
    found = band(tmp_path)
    text = found.description()
    assert text.startswith("3 machines at first. 3 min 30 s after the beginning, from step 10 on: 2 machines, c lost. ")
    assert text.endswith("of their time is missing.")
    table = found.table()
    assert table.body[0] == ["2", "3 min 30 s", "10", "2", "16", "c lost", "10 s", "1", "rank 2 was lost"]
    assert table.body[1] == ["3", "6 min 20 s", "20", "3", "24", "c joined", "1 min 10 s", "0", "-"]


def test_processes_are_drawn_where_machines_stay_as_many(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.train(20)
    log.end()
    log.start(down=5)
    sizes = {"machines": 1, "machines_before": 1, "processes": 2, "processes_before": 4}
    log.write("membership", number=2, pause=17.0, again=0, in_process=False, **sizes)
    log.train(40)
    log.end()
    found = MachineBand(RunHistory(tmp_path))
    assert (found.noun, found.title, found.full) == ("process", "Processes over time", 4)
    assert found.description().startswith("4 processes at first. ")


def test_every_format_shows_it(tmp_path: Path) -> None:
    elastic(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count('aria-label="3 machines at first.') == 2  # for wide and for narrow screens
    assert "Table: Machines over time" in page
    assert "node3 lost" in page
    assert "### Machines over time" in write_report(tmp_path, tmp_path / "report.md").read_text(encoding="utf-8")
    titles = [axes.get_title(loc="left") for axes in drawing._picture([RunHistory(tmp_path)]).axes]
    assert "Machines over time" in titles


def test_a_run_whose_machines_stay_shows_nothing(tmp_path: Path) -> None:
    eventful(tmp_path)
    assert not MachineBand.exists(RunHistory(tmp_path))
    assert "achines over time" not in write_report(tmp_path).read_text(encoding="utf-8")

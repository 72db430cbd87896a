from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from kit.run_logs import RunLog, eventful, finished

from trainer_kit.report import write_report
from trainer_kit.report.markdown import escaped, sparkline
from trainer_kit.report.panels import Series


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table; every row has as many as the head."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        assert len({len(row) for row in rows}) == 1
        assert set("".join(rows[1])) <= set("-: ")
        found.append([[cell.strip() for cell in row] for row in rows])
    return found


def test_one_run(tmp_path: Path) -> None:
    path = write_report(eventful(tmp_path / "run"), format="md")
    text = path.read_text(encoding="utf-8")
    assert path.name == "report.md"
    assert text.startswith("## Training report: run\n")
    summary, curves, time, memory, evaluations, arguments = tables(text)
    assert ["Status", "finished: All steps were taken."] in summary
    assert ["Wall time", "49 min 34 s (2 restarts, 4 min 30 s lost, 8 min 35 s down)"] in summary
    assert curves[2][0] == "Loss: training"
    assert re.fullmatch("[▁▂▃▄▅▆▇█]{24}", curves[2][1])
    assert time[2][0] == "backward"
    assert memory[-1][0] == "together"
    assert len(evaluations) == 2 + 10
    assert evaluations[-1][0] == "2,000 (best)"
    assert ["learning\\_rate", "0.0006"] in arguments
    assert "- lr\\_scheduler.step() was called twice (step 1,380, 1 time)" in text
    assert "> 31 records of steps" in text


def test_several_runs(tmp_path: Path) -> None:
    path = write_report(finished(tmp_path / "a"), tmp_path / "two.md", compare=[eventful(tmp_path / "b")])
    text = path.read_text(encoding="utf-8")
    summary, curves, time, _, arguments = tables(text)
    assert summary[0] == ["", "a", "b"]
    assert [row[0] for row in curves[2:4]] == ["Training loss: a", "Training loss: b"]
    assert time[0] == ["Activity", "a", "b"]
    assert ["down", "0 %", "17.3 %"] in time
    assert ["learning\\_rate", "0.0003", "0.0006"] in arguments
    assert "> b: 31 records" in text


def test_texts_stay_texts(tmp_path: Path) -> None:
    evil = "a | b\n\n# <script>`x` *y* [z](http://w) @someone ![i](j) $e$ ~s~ \\|"
    log = RunLog(tmp_path, **{evil: evil})
    log.start()
    log.log(**{evil: 1.0})
    log.write("warning", message=evil, source=evil)
    text = write_report(log.path, tmp_path / "x.md").read_text(encoding="utf-8")
    assert tables(text)
    assert text.count(escaped(evil)) == 4  # the argument, the number of its own, the warning and its source
    assert not re.search(r"(?<!\\)[<\[`@$]", text)


@pytest.mark.parametrize(
    ("values", "line"),
    [([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"), ([5, 5], "▁▁"), ([2], "▁"), ([1, 0], "█▁")],
)
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(Series("", 0, np.arange(float(len(values))), np.array(values, float))) == line

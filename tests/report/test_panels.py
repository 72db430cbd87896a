from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
from run_logs import RunLog, finished

from trainer_kit.report import blocks, wording
from trainer_kit.report.facts import notices
from trainer_kit.report.history import RunHistory
from trainer_kit.report.panels import Panel, Series, names_of, own_metrics, panels, thin


def line(*values: float, label: str = "Loss") -> Series:
    return Series(label, 0, np.arange(1.0, len(values) + 1), np.array(values))


def test_thinning_keeps_every_extreme_in_its_place() -> None:
    noise = np.random.default_rng(0)
    steps, values = np.sort(noise.uniform(0, 1e6, 20_000)), noise.normal(size=20_000)
    values[777], values[12_345] = 50, -50
    thinned = thin(Series("", 0, steps, values), 300)
    assert len(thinned.steps) <= 300
    edges = np.linspace(steps[0], steps[-1], 301)
    for low, mean, high, step in zip(thinned.low, thinned.mean, thinned.high, thinned.steps, strict=True):
        column = int(np.searchsorted(edges, step)) - 1
        inside = values[(steps >= edges[column]) & (steps < edges[column + 1] + (column == 299))]
        assert (low, high) == (inside.min(), inside.max())
        assert math.isclose(mean, inside.mean(), abs_tol=1e-9)
    assert (thinned.high.max(), thinned.low.min()) == (50, -50)


def test_few_values_stay_as_they_are() -> None:
    series = line(3, 1, 2)
    thinned = thin(series, 3)
    assert thinned.mean.tolist() == thinned.low.tolist() == thinned.high.tolist() == [3, 1, 2]
    assert thin(Series("", 0, np.full(9, 5.0), np.arange(9.0)), 4).high.tolist() == [8]  # all at one step


def test_a_description_says_what_is_to_be_seen() -> None:
    panel = Panel("loss", "Loss", (line(2.5, 0.5, math.nan, 1.5),))
    told = "first 2.5 at step 1, last 1.5 at step 4, least 0.5 at step 2, greatest 2.5 at step 1. 1 value not finite."
    assert panel.description() == f"Loss by step. {told}"
    several = Panel("loss", "Loss", (line(1.0, label="training"), line(math.inf, label="evaluation")))
    expected = "Loss by step. training: last 1 at step 1. evaluation: no finite value. 1 value not finite."
    assert several.description() == expected


def test_a_logarithmic_scale_where_a_plain_one_would_hide_most() -> None:
    assert not Panel("loss", "", (line(10, 8, 6, 4, 2),)).is_logarithmic
    assert Panel("loss", "", (line(1e5, 8, 6, 4, 2),)).is_logarithmic
    assert Panel("loss", "", (line(5, 5, 5, 5, 1e-4),)).is_logarithmic
    assert not Panel("loss", "", (line(1e5, 8, 6, 4, 0),)).is_logarithmic
    assert not Panel("loss", "", (line(1e5, 8, 6, 4, 2),), from_zero=True).is_logarithmic
    assert Panel("loss", "Loss", (line(1e5, 8, 6, 4, 2),)).description().endswith("The scale is logarithmic.")


def test_a_table_has_some_rows_of_each_line() -> None:
    many = Series("training", 0, np.arange(1.0, 1001), np.arange(1.0, 1001) / 8)
    few = Series("evaluation", 1, np.array([300.0, 1200.0]), np.array([7.0, math.nan]))
    table = Panel("loss", "Loss", (many, few)).table(rows=5)
    assert table.head == ["Step", "training", "evaluation"]
    assert table.body[0] == ["1", "0.125", "-"]
    assert table.body[-2:] == [["1,000", "125", "-"], ["1,200", "-", "nan"]]
    assert ["300", "37.5", "7"] in table.body
    assert (len(table.body), table.of) == (7, 1000)


def test_the_plots_of_a_run(tmp_path: Path) -> None:
    found = {panel.key: panel for panel in panels([RunHistory(finished(tmp_path))])}
    assert list(found) == [
        "loss", "eval_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "efficiency", "memory",
    ]  # fmt: skip
    assert [series.label for series in found["loss"].series] == ["training", "evaluation"]
    assert [series.label for series in found["efficiency"].series] == [
        "goodput", "model FLOPs utilization", "waiting for data",
    ]  # fmt: skip
    assert len(found["memory"].series) == 6
    assert found["memory"].word is wording.size


def test_the_plots_of_several_runs_have_a_line_for_each(tmp_path: Path) -> None:
    histories = [RunHistory(finished(tmp_path / name)) for name in ("a", "b")]
    for panel in panels(histories):
        assert [series.label for series in panel.series] == ["a", "b"]
        assert [series.style for series in panel.series] == [0, 1]


def test_a_run_that_logged_little(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    assert panels([RunHistory(tmp_path)]) == []
    log.step = 5
    log.write("log", loss=1.0)
    (panel,) = panels([RunHistory(tmp_path)])
    assert panel.key == "loss"


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "y" / "other"]
    assert names_of([RunHistory(finished(path)) for path in paths]) == ["x/run", "y/run", "y/other"]
    assert names_of([RunHistory(paths[0]), RunHistory(paths[2])]) == ["run", "other"]


def test_notes_say_how_to_read_a_plot() -> None:
    assert Panel("loss", "Loss", (line(3, 2, 1),), note="Its own.").notes(columns=3) == "Its own."
    assert "bands reach from the least to the greatest" in Panel("loss", "Loss", (line(3, 2, 1),)).notes(columns=2)
    assert Panel("loss", "Loss", (line(3, 2, math.nan),)).notes(3) == "Crosses mark values that are not finite."
    assert Panel("loss", "Loss", (line(300, 2, 1),)).notes(3) == "The scale is logarithmic."


def test_callbacks_own_numbers_have_curves(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "own")
    log.start()
    for number in range(5):
        log.log(**{"gan/g_loss": 1.0 / (number + 1), "temperature": 0.5, **{f"more_{each}": 1.0 for each in range(12)}})
    history = RunHistory(tmp_path / "own")
    found = {panel.key: panel for panel in panels([history])}
    assert [*found][1:3] == ["gan/g_loss", "temperature"]
    assert found["gan/g_loss"].title == "gan/g_loss"
    assert len(own_metrics(history)) == 14
    assert "more_10" not in found
    assert "2 more numbers of callbacks, from more_10 on, only in log.jsonl." in notices(history)
    assert own_metrics(RunHistory(finished(tmp_path / "usual"))) == []
    both = {panel.key: panel for panel in panels([history, RunHistory(tmp_path / "usual")])}
    assert [series.label for series in both["temperature"].series] == ["own"]


def test_the_best_evaluation_is_marked(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for loss in (0.5, 0.25, 0.75):
        log.log()
        log.evaluate(eval_loss=loss)
    loss, accuracy = panels([RunHistory(tmp_path)])[:2]
    assert [series.best for series in loss.series] == [None, 20]
    assert accuracy.series[0].best is None
    assert "best 0.25 at step 20" in loss.description()
    text = blocks.curves(loss, "curve")
    assert "<span>best</span><b>0.25 at step 20</b>" in text
    assert text.count("<path") > blocks.curves(dataclasses.replace(loss, series=loss.series[:1]), "curve").count(
        "<path"
    )

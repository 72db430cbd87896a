from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from kit.run_logs import eventful, finished
from matplotlib.image import imread

from trainer_kit import report
from trainer_kit.report import drawing, write_report
from trainer_kit.report.history import RunHistory
from trainer_kit.report.panels import Panel, Series


def test_text_is_text_and_colours_are_the_pages() -> None:
    panel = Panel("loss", "Loss", (Series("training", 0, np.array([1.0, 2.0]), np.array([3.0, 5.0])),))
    with drawing.settings():
        svg = drawing.curves(panel, "curve-1")
    assert re.findall(r"<text[^>]*>([^<]*)</text>", svg)[-1] == "step"
    assert "var(--line-0)" in svg
    assert not re.search(r"#[0-9a-f]{6}", svg)
    assert set(re.findall(r' id="([^"]*)"', svg)) == set(re.findall(r"#([\w-]+)\)", svg))
    assert all(name.startswith("curve-1-") for name in re.findall(r' id="([^"]*)"', svg))


def test_the_users_settings_are_not_those_of_a_report() -> None:
    panel = Panel("loss", "Loss", (Series("training", 0, np.array([1.0, 2.0]), np.array([3.0, 5.0])),))
    with drawing.settings():
        expected = drawing.curves(panel, "curve")
    with matplotlib.rc_context(
        {"font.size": 40, "lines.linewidth": 9, "axes.facecolor": "red", "svg.fonttype": "path"}
    ):
        with drawing.settings():
            assert drawing.curves(panel, "curve") == expected
        assert matplotlib.rcParams["font.size"] == 40


def test_a_long_line_is_drawn_with_its_extremes() -> None:
    steps = np.arange(100_000.0)
    values = np.zeros(100_000)
    values[5], values[70_000] = 8, -8
    with drawing.settings():
        svg = drawing.curves(Panel("loss", "Loss", (Series("training", 0, steps, values),)), "curve")
    found = [float(height) for height in re.findall(r"[ML] [\d.]+ (-?[\d.]+)", svg)]
    heights = [height if height >= 0 else height + drawing.NARROW[1] for height in found]  # areas from the foot
    assert len(svg) < 40_000
    assert 0 < sum(height < 30 for height in heights) <= 3  # where 8 is, in one column
    assert any(180 < height < 197 for height in heights)  # where -8 is; the scale lies below


def words(steps: list[float], values: list[float]) -> list[str]:
    """The texts of a plot: the ticks across, the ticks up, and what the steps are."""
    panel = Panel("loss", "Loss", (Series("training", 0, np.array(steps), np.array(values)),))
    with drawing.settings():
        return re.findall(r"<text[^>]*>([^<]*)</text>", drawing.curves(panel, "curve"))


def test_ticks_are_where_they_say() -> None:
    assert words([10], [10.6]) == ["10", "10.25", "10.5", "10.75", "11", "step"]
    assert words([101_000, 109_000], [1e-4, 1.1e-4])[:4] == ["102k", "104k", "106k", "108k"]
    assert words([1, 2], [1.0e-5, 1.1e-5])[2:5] == ["1e-5", "1.025e-5", "1.05e-5"]
    assert words([10, 20], [math.nan, math.inf]) == ["10", "15", "20", "step"]


@pytest.mark.slow
@pytest.mark.parametrize("compared", [False, True])
def test_a_picture(tmp_path: Path, compared: bool) -> None:
    others = [eventful(tmp_path / "日本 $x$")] if compared else []
    path = write_report(finished(tmp_path / "a"), format="png", compare=others)
    assert path == tmp_path / "a" / "report.png"
    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert 1500 < width < 4000
    assert 1000 < height < 4000
    assert pixels[..., :3].std() > 0.05


def test_a_picture_names_its_marks(tmp_path: Path) -> None:
    with drawing.settings():
        figure = drawing._picture([RunHistory(eventful(tmp_path))])
    legends = [axes.get_legend() for axes in figure.axes]
    named = [text.get_text() for legend in legends if legend is not None for text in legend.get_texts()]
    assert named.count("restart") == 1
    assert {"lost", "down", "training", "weights"} <= {*named}


def test_without_matplotlib_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("drawing", "blocks", "page"):
        monkeypatch.delitem(sys.modules, f"trainer_kit.report.{name}", raising=False)
        monkeypatch.delattr(report, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"a report needs matplotlib .*pip install matplotlib"):
        write_report(finished(tmp_path))
    assert write_report(tmp_path, format="md").exists()


def test_the_fonts_of_older_releases_of_matplotlib_lose_their_family_too() -> None:
    written = "font: 700 13.2px 'DejaVu Sans'; text-anchor: end", "font: 11px 'DejaVu Sans'"
    assert [drawing._FONT.sub(drawing._without_family, each) for each in written] == [
        "font-weight: 700; font-size: 13.2px; text-anchor: end", "font-size: 11px",
    ]  # fmt: skip

"""Recorded plots speak the language of the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_builder.plots import plot_in

ROOT = Path(__file__).parents[3]
PLOT = (
    '<figure><figcaption><strong>Loss</strong><span class="label"><svg class="sample"><path/></svg>training'
    '</span></figcaption><svg role="img" aria-label="Loss by step. training: first 7.5 at step 10, last 1e-07 at step '
    '1,060. The scale is logarithmic."><text x="1">step</text><text>6.5</text></svg></figure>\n'
)


def test_an_arabic_page_has_arabic_words_around_the_same_curve() -> None:
    assert plot_in("ar", PLOT) == (
        '<figure><figcaption><strong>الخسارة</strong><span class="label"><svg class="sample"><path/></svg>'
        'التدريب</span></figcaption><svg role="img" aria-label="الخسارة بحسب الخطوة. التدريب: الأولى 7.5 عند الخطوة '
        '10، الأخيرة 1e-07 عند الخطوة 1,060. التدريج لوغاريتمي.">'
        '<text x="1">الخطوة</text><text>6.5</text></svg></figure>\n'
    )
    assert plot_in("en", PLOT) == PLOT


def test_names_of_compared_runs_stay_as_they_are() -> None:
    assert 'aria-label="الخسارة بحسب الخطوة. manual_loop-2/log: الأولى 7.5' in plot_in(
        "ar", PLOT.replace("training", "manual_loop-2/log")
    )


def test_a_word_without_a_translation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a plot says 'Perplexity', which plots.py lacks in 'ar'"):
        plot_in("ar", PLOT.replace("<strong>Loss", "<strong>Perplexity"))


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "recorded").glob("*/*.svg")), ids=lambda path: path.stem)
def test_all_recorded_plots_are_translated(path: Path) -> None:
    assert "by step" not in plot_in("ar", path.read_text(encoding="utf-8"))

"""The words of a recorded plot in the language of the page: its title, its legend, its axis and its description."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORDS: Mapping[str, Mapping[str, str]] = {
    "ar": {
        "Loss": "الخسارة",
        "Training loss": "خسارة التدريب",
        "Learning rate": "معدّل التعلّم",
        "Evaluation accuracy": "نسبة الصواب في التقييم",
        "Evaluation worst recall": "أسوأ نسبة استرجاع في التقييم",
        "disagreements": "عدد الوسوم التي يخالفها النموذج",
        "training": "التدريب",
        "evaluation": "التقييم",
        "step": "الخطوة",
        "by step": "بحسب الخطوة",
        "first": "الأولى",
        "last": "الأخيرة",
        "least": "الصغرى",
        "greatest": "الكبرى",
        "best": "الفضلى",
        "at step": "عند الخطوة",
        "The scale is logarithmic": "التدريج لوغاريتمي",
        "The memory of a step": "ذاكرة الخطوة",
        "estimated": "مقدَّرة",
        "measured": "مقيسة",
        "weights": "الأوزان",
        "buffers": "المخازن",
        "batch": "الدفعة",
        "gradients": "التدرّجات",
        "optimizer": "المحسِّن",
        "activations": "قيم التنشيط",
        "temporary": "نتائج مؤقتة",
        "MiB": "MiB",
        **{name: name for name in ("ddp", "ddp-2", "manual_loop/log", "manual_loop-2/log")},
    }
}
"""What each language has in place of the report's English."""

_TEXTS = re.compile(
    r"(?<=<strong>)[^<]+(?=</strong>)|(?<=</svg>)[^<]+(?=</span>)|(?<=>)(?!\d)[^<>]*[a-zA-Z][^<>]*(?=</text>)"
)
_DESCRIPTION = re.compile(r'(?<= aria-label=")[^"]*')
_PHRASE = re.compile(r"by step|at step|(?<![\w-])[A-Za-z][\w /-]*?(?= by step| -?[\d.]|[.:,]|$)")


def plot_in(language: str, plot: str) -> str:
    """Return a recorded plot with its words in a language.

    Args:
        language: The language of the page.
        plot: The figure as HTML, in English.

    Raises:
        ValueError: If a word has no translation.
    """
    words = _WORDS.get(language)
    if words is None:
        return plot

    def translated(phrase: re.Match[str]) -> str:
        if phrase[0] not in words:
            raise ValueError(f"a plot says '{phrase[0]}', which plots.py lacks in '{language}'; add it")
        return words[phrase[0]]

    def described(sentences: re.Match[str]) -> str:
        return _PHRASE.sub(translated, sentences[0]).replace(", ", "، ")

    return _DESCRIPTION.sub(described, _TEXTS.sub(translated, plot))

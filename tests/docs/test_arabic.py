"""The Arabic pages have the content of the English ones, and the terms of the glossary."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH, ARABIC = ROOT / "docs" / "en", ROOT / "docs" / "ar"
TRANSLATED = {
    *(ENGLISH / "index.md", ENGLISH / "glossary.md"),
    *(ENGLISH / "explanation" / f"{name}.md" for name in ("index", "anatomy")),
    *(page for folder in ("tutorials", "how-to") for page in ENGLISH.glob(f"{folder}/*.md")),
}
PAIRS = {page: ARABIC / page.relative_to(ENGLISH) for page in sorted(TRANSLATED)}
PAIRS |= {ENGLISH / page.relative_to(ARABIC): page for page in sorted(ARABIC.rglob("*.md"))}
PAIRS[ROOT / "README.md"] = ROOT / "README.ar.md"
NAMES = [page.relative_to(ROOT).as_posix() for page in PAIRS]

CODE = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]*)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]*)\)")
INCLUDED = re.compile(r"^::: .+$", re.MULTILINE)  # scripts, outputs and plots that both languages share
NUMBER = re.compile(r"(?<![a-zA-Z\d_.])(?![12]\b(?![.,]\d))\d+(?:[.,]\d+)*")  # Arabic writes 1 and 2 as words
MARKS = re.compile("[\u064b-\u0652\u0670\u0640]")  # short vowels and lengthenings
SEVERAL_SENSES = {"item", "resume", "shard", "token", "verification"}
"""Terms whose first use is not looked for: their Arabic words have other senses too, or other forms as verbs."""

REJECTED = {
    "argument": ("معامل", "معاملات", "بارامتر", "باراميتر"),
    "adapter": ("محولات", "مكيف", "مكيفات"),
    "backward pass": ("تمرير خلفي", "انتشار خلفي"),
    "batch": ("باتش", "باتشات"),
    "callback": ("كولباك", "استدعاء راجع", "رد اتصال", "ردود اتصال"),
    "checkpoint": ("نقطة استعادة", "نقاط استعادة", "نقطة تفتيش", "نقاط تفتيش", "نقطة فحص", "نقاط فحص"),
    "compilation": ("ترجمة", "تجميع برمجي"),
    "dataset": ("داتاسيت", "طقم بيانات"),
    "epoch": ("إيبوك", "إبوك", "عصر", "عصور", "دورة تدريب"),
    "forward pass": ("تمرير أمامي", "انتشار أمامي"),
    "gradient": ("ميول", "غراديان", "تدريجات", "انحدارات"),
    "hook": ("هوك", "صنارة"),
    "label": ("لافتة", "لافتات", "ملصق", "ملصقات", "لصيقة"),
    "learning rate": ("معدل تعليم", "نسبة تعلم", "سرعة تعلم"),
    "loss": ("دالة فقد", "فقدان"),
    "machine": ("آلة", "آلات", "ماكينة", "ماكينات"),
    "metric": ("متريك", "متريات"),
    "notebook": ("نوتبوك", "مفكرة"),
    "optimizer": ("مستمثل", "أمثلية", "أوبتيمايزر"),
    "padding": ("تبطين", "توسيد"),
    "process": ("سيرورة", "بروسيس"),
    "rank": ("رانك", "مرتبة"),
    "script": ("نص برمجي", "نصوص برمجية", "سكريبت"),
    "seed": ("نواة عشوائية", "سيد"),
    "shard": ("شظية", "شظايا", "شارد"),
    "tensor": ("تنسور", "تينسور", "تنسورات"),
    "token": ("توكن", "توكنات"),
}
"""Translations that readers may know, but that the pages do not use, by the English term."""


def sections(text: str) -> list[dict[str, Any]]:
    """What can be compared of each section of a page; the first section begins at the title."""
    blocks = CODE.findall(text)
    prose = CODE.sub("\0", text)
    found = []
    for part in re.split(r"^(?=#+ )", prose, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        words = LINK.sub("]", body)
        rows = [row for row in body.splitlines() if row.startswith("|")]
        found.append(
            {
                "level": heading.split()[0],
                "code blocks": [blocks.pop(0) for _ in range(body.count("\0"))],
                "columns of table rows": [row.count("|") - row.count("\\|") for row in rows],
                "list items": len(re.findall(r"^(?:- |\d+\. )", body, re.MULTILINE)),
                "pictures": PICTURE.findall(body),
                "included files": INCLUDED.findall(body),
                "names": {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", words)},
                "numbers": Counter(NUMBER.findall(re.sub(r"`[^`]+`|^\d+\. ", "", words, flags=re.MULTILINE))),
            }
        )
    return found


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def targets(page: Path, text: str) -> list[tuple[str, int | None]]:
    """The links of a page: the English page that each leads to or stands for, and the number of the heading."""
    found: list[tuple[str, int | None]] = []
    for link in LINK.findall(CODE.sub("", text)):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            found.append((link, None))
            continue
        file = Path(os.path.normpath(page.parent / path)) if path else page
        number = anchors(file).index(anchor) if anchor else None
        english = next((one for one, other in PAIRS.items() if other == file), file)
        found.append((english.relative_to(ROOT).as_posix(), number))
    return found


def differences(english: str, arabic: str) -> list[str]:
    """Say what an Arabic page has that the English one lacks, and the other way round."""
    ours, theirs = sections(english), sections(arabic)
    if len(ours) != len(theirs):
        return [f"{len(ours)} sections in English, {len(theirs)} in Arabic"]
    return [
        f"section {number}, {what}: {one[what]} in English, {other[what]} in Arabic"
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1)
        for what in one
        if one[what] != other[what]
    ]


def glossary() -> dict[str, tuple[str, ...]]:
    """The Arabic forms of each English term."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([a-z -]+) \|", (ARABIC / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    return {english: tuple(arabic.split("، ")) for arabic, english in rows}


def pattern(form: str) -> str:
    """A pattern of an Arabic term without short vowels, with article, prefixes and endings."""
    words = []
    for word in MARKS.sub("", form).split():
        stem = re.sub("^ال", "", word)
        stem = stem[:-1] + "[ةت]" if stem.endswith("ة") else stem
        words.append(rf"(?:[وفبكل]{{0,2}}(?:ال|لل)?){stem}(?:ها|هما|هم|ه|ك|ين|ان|تين|تان|ا)?")  # noqa: RUF001
    return r"(?<!\w)" + r"\s+".join(words) + r"(?!\w)"


def plain(text: str) -> str:
    """The prose of a page without code, addresses, headings and short vowels."""
    text = re.sub(r"^#+ .*$", "", CODE.sub("", text), flags=re.MULTILINE)
    text = LINK.sub("]", re.sub(r"`[^`]+`", "`", text))
    return MARKS.sub("", " ".join(text.split()))


def rejected(text: str) -> Iterator[str]:
    """The translations on a page that the glossary does not choose."""
    text = MARKS.sub("", CODE.sub("", text))
    for term, forms in REJECTED.items():
        yield from (
            f"{form}: write {glossary()[term][0]} for {term}" for form in forms if re.search(pattern(form), text)
        )


def unexplained(text: str) -> Iterator[str]:
    """The terms whose first use on a page lacks the English term in parentheses."""
    text = plain(text)
    terms = glossary()
    for term, forms in terms.items():
        if term in SEVERAL_SENSES:
            continue
        longer = [
            each for other in terms.values() for each in other if any(each.startswith(f"{form} ") for form in forms)
        ]
        rest = text
        for each in longer:
            rest = re.sub(pattern(each), "", rest)
        first = min(
            (found for form in forms if (found := re.search(pattern(form), rest))),
            key=lambda f: f.start(),
            default=None,
        )
        name = f"{term[:-1]}(?:y|ies)" if term.endswith("gy") else f"{term}(?:s|es)?"
        if first and not re.match(rf"[^()]{{0,30}}\([^)]*\b{name}\b", rest[first.end() :]):
            yield f"{first[0]}: add ({term}) after {rest[max(0, first.start() - 30) : first.end() + 30]}"


@pytest.mark.parametrize(("english", "arabic"), PAIRS.items(), ids=NAMES)
def test_both_languages_have_the_same_content(english: Path, arabic: Path) -> None:
    assert english.is_file(), f"{english} is missing"
    assert arabic.is_file(), f"{arabic} is missing"
    texts = english.read_text(encoding="utf-8"), arabic.read_text(encoding="utf-8")
    assert not differences(*texts)


@pytest.mark.parametrize(("english", "arabic"), PAIRS.items(), ids=NAMES)
def test_links_lead_to_the_same_places_in_arabic_where_they_exist(english: Path, arabic: Path) -> None:
    ours, theirs = (targets(page, page.read_text(encoding="utf-8")) for page in (english, arabic))
    switch = [("README.md", None)]  # from one README to the other
    assert Counter(theirs) - Counter(switch) == Counter(ours) - Counter(switch)
    for link in LINK.findall(CODE.sub("", arabic.read_text(encoding="utf-8"))):
        file = Path(os.path.normpath(arabic.parent / link.partition("#")[0]))
        assert file not in PAIRS or file == ROOT / "README.md", f"{link} leads to English; link to the Arabic page"


@pytest.mark.parametrize("page", PAIRS.values(), ids=NAMES)
def test_the_terms_are_those_of_the_glossary(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not list(rejected(text))
    assert page.name == "glossary.md" or not list(unexplained(text))


@pytest.mark.parametrize("page", PAIRS.values(), ids=NAMES)
def test_numbers_with_signs_and_latin_units_read_from_left_to_right(page: Path) -> None:
    text = re.sub(r"`[^`]+`", "", LINK.sub("", CODE.sub("", page.read_text(encoding="utf-8"))))
    unmarked = re.findall(r"(?<![\w.,;-])(?:-\d+|\d[\d.,]*[ -][a-zA-Z]{2,})", text)
    assert not unmarked, "write &lrm; before each"


def test_the_glossaries_agree() -> None:
    rows = re.findall(
        r"^\| ([a-z -]+) \| ([^|]*[^|a-zA-Z-]) \|", (ENGLISH / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {english: tuple(arabic.split("، ")) for english, arabic in rows} == glossary()
    assert len(rows) > 50
    assert {*REJECTED, *SEVERAL_SENSES} <= {*glossary()}


@pytest.mark.parametrize("page", PAIRS.values(), ids=NAMES)
def test_headings_have_no_short_vowels(page: Path) -> None:
    headings = re.findall(r"^#+ .*$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    assert not [
        heading for heading in headings if MARKS.search(heading)
    ]  # GitHub's anchors keep them, the site's do not


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("## الخسائر\n", "", "sections in English"),
        ("model(batch", "net(batch", "code blocks"),
        ("| `(loss_sum, count)` |", "`(loss_sum, count)`", "columns of table rows"),
        ('\n- `optim="sgd"`', ' `optim="sgd"`', "list items"),
        ("`log_mean(name, value, count=None)`", "`log_mean(name, value)`", "names"),
        ("compute capability) 8.9", "compute capability) 8.0", "numbers"),
        ("# التدريب باستخدام Trainer\n", "# التدريب باستخدام Trainer\n![](a.svg)\n", "pictures"),
        ("# التدريب باستخدام Trainer\n", "# التدريب باستخدام Trainer\n::: plot: runs/a loss\n", "included files"),
    ],
)
def test_a_difference_is_found(before: str, after: str, what: str) -> None:
    english, arabic = ((folder / "how-to" / "train.md").read_text(encoding="utf-8") for folder in (ENGLISH, ARABIC))
    assert before in arabic
    assert what in differences(english, arabic.replace(before, after, 1))[0]


def test_a_wrong_term_is_found() -> None:
    [found] = rejected("تُحفظ نقاط الاستعادة")
    assert found.startswith("نقاط استعادة: write نقطة حفظ")
    [found] = unexplained("تُكتب نقطةُ حفظٍ بعد كل تقييم")
    assert "add (checkpoint)" in found
    assert not list(unexplained("تُكتب نقطةُ حفظٍ (checkpoint) بعد كل تقييم"))
    [found] = unexplained("تكتب المكتبة تقريرًا")
    assert "add (report)" in found

"""The search ranks guides before the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from site_builder.search import ignore_marks, rank, ranked, without_marks


def item(location: str, title: str, *path: str) -> dict[str, Any]:
    return {"location": location, "title": title, "path": list(path), "text": "", "level": 1, "tags": []}


ITEMS = [
    item("reference/a.html#trainer_kit.A.loss_scale", "loss_scale <small>property</small>", "Reference", "A"),
    item("reference/a.html#errors", "Errors", "Reference", "A"),
    item("how-to/train.html", "Train", "How-to", "Train"),
    item("how-to/train.html#loss", "Loss", "How-to", "Train"),
]


def test_guides_come_first_with_their_words_in_two_fields() -> None:
    assert [(each["title"], each["path"]) for each in ranked(ITEMS)] == [
        ("Train", ["Train"]),
        ("Loss", ["Train", "Loss"]),
        ("trainer_kit.A.loss_scale <small>property</small>", ["Reference"]),
        ("Errors", ["Reference"]),
    ]


def test_both_files_of_the_index_are_ranked(tmp_path: Path) -> None:
    text = json.dumps({"config": {"lang": ["en"]}, "items": ITEMS})
    (tmp_path / "search.json").write_text(text)
    (tmp_path / "search.js").write_text(f"var __index = {text}")
    rank(tmp_path)
    written = (tmp_path / "search.json").read_text()
    assert json.loads(written) == {"config": {"lang": ["en"]}, "items": ranked(ITEMS)}
    assert (tmp_path / "search.js").read_text() == f"var __index = {written}"
    (tmp_path / "search.js").write_text(f"index = {text}")
    with pytest.raises(ValueError, match=r"adapt search.py to this generator"):
        rank(tmp_path)


def test_the_index_has_as_many_characters_of_a_word_as_are_compared(tmp_path: Path) -> None:
    marked = item("a.html#b", "المصرِّف", "دروس", "المُصرّف") | {"text": "وهو المصرِّف (compiler)؛ نقـطة أ é"}
    plain = item("a.html#b", "المصرف", "دروس", "المصرف") | {"text": "وهو المصرف (compiler)؛ نقطة أ é"}
    assert without_marks(marked) == plain
    text = json.dumps({"items": [marked]})
    (tmp_path / "search.json").write_text(text)
    (tmp_path / "search.js").write_text(f"var __index = {text}")
    rank(tmp_path)
    assert json.loads((tmp_path / "search.json").read_text(encoding="utf-8")) == {"items": ranked([plain])}


def test_words_are_compared_without_marks(tmp_path: Path) -> None:
    script = tmp_path / "assets" / "javascripts" / "workers" / "search.0.min.js"
    script.parent.mkdir(parents=True)
    script.write_text('f(t){return t.normalize("NFKD").toLowerCase()}')
    ignore_marks(tmp_path)
    assert script.read_text() == r'f(t){return t.normalize("NFKD").replace(/[\p{M}\u0640]/gu,"").toLowerCase()}'
    script.write_text("f(t){return t.toLowerCase()}")
    with pytest.raises(ValueError, match=r"adapt search.py to this generator"):
        ignore_marks(tmp_path)

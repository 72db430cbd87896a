"""Comparison of two starts, line by line."""

from __future__ import annotations

from pathlib import Path

from trainer_kit.tools.verify.compare import Line, first_difference, read_lines


def line(step: int, **parts: dict[str, str]) -> Line:
    return Line(step, parts, {})


def test_the_first_difference_is_that_which_the_others_follow_from() -> None:
    one = line(3, loss={"": "1"}, model={"a": "1", "b": "1"}, batch={"x": "1"})
    found = first_difference(one, line(3, model={"a": "2", "b": "2"}, loss={"": "2"}, batch={"x": "1"}))
    assert found is not None
    assert (found.place, found.others) == ("loss.", 0)
    found = first_difference(one, line(3, model={"a": "1", "b": "2"}, batch={"x": "2"}), is_restored=True)
    assert found is not None
    assert (found.place, found.expected, found.found) == ("model.b", "1", "2")
    assert first_difference(one, one) is None
    missing = first_difference(one, line(3, loss={"": "1"}, model={"a": "1"}, batch={"x": "1"}))
    assert missing is not None
    assert (missing.place, missing.found) == ("model.b", None)


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a-0.jsonl"
    assert read_lines(path) == ({}, [])
    path.write_text('{"save_at": 2}\n{"step": 0, "parts": {}, "hints": {}}\n{"step": 1, "pa')
    assert read_lines(path) == ({"save_at": 2}, [Line(0, {}, {})])

"""Tables in Markdown, and the parts of docstrings."""

from __future__ import annotations

from site_builder.tables import code, first_sentence, sections, table


def example() -> None:
    """Do a thing.

    More of it.

    Args:
        a: The first, which
            goes on.
        b: The second.
    """


def test_a_cell_stays_one_cell() -> None:
    lines = table(["a", "b"], [["x | y", "one\ntwo"]]).splitlines()
    assert lines == ["| a | b |", "| --- | --- |", "| x &#124; y | one two |"]
    assert code("int | None") == "<code>int &#124; None</code>"
    assert code("int") == "`int`"


def test_a_docstring_has_parts() -> None:
    found = sections(example)
    assert found["text"] == "Do a thing.\n\nMore of it."
    assert found["parameters"] == {"a": "The first, which\ngoes on.", "b": "The second."}
    assert first_sentence(example) == "Do a thing."

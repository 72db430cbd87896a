"""Options in inline code are not broken at their hyphens."""

from __future__ import annotations

import pytest
from site_builder.code_words import with_whole_words, without_gaps


@pytest.mark.parametrize(
    ("code", "marked"),
    [
        ("launch --max-restarts 3", 'launch <span class="word">--max-restarts</span> 3'),
        ("a &lt;x-y&gt; b", 'a <span class="word">&lt;x-y&gt;</span> b'),
        ("max_steps", "max_steps"),
        (
            "--dataloader_multiprocessing_context=fork",
            '<span class="word">--dataloader</span>_multiprocessing_context=fork',
        ),
        ("a/very/long/path/to/a/checkpoint-500", "a/very/long/path/to/a/checkpoint-500"),
    ],
)
def test_words_with_hyphens_are_marked(code: str, marked: str) -> None:
    assert with_whole_words(f"<p><code>{code}</code></p>") == f"<p><code>{marked}</code></p>"


def test_blocks_stay() -> None:
    block = '<pre><code class="md-code">a --max-restarts</code></pre><code>a\nb --c-d</code> x-y'
    assert with_whole_words(block) == block


def test_code_in_a_text_from_right_to_left_is_marked_by_its_length() -> None:
    lengths = {30: '<code class="short">', 31: '<code class="long">', 60: '<code class="long">', 61: "<code>"}
    for length, opening in lengths.items():
        code = "&lt;" + "x" * (length - 1)
        assert with_whole_words(f"<code>{code}</code>", right_to_left=True) == f"{opening}{code}</code>"
    words = '<code class="short">launch <span class="word">--max-restarts</span></code>'
    assert with_whole_words("<code>launch --max-restarts</code>", right_to_left=True) == words


def test_a_default_has_no_space_before_its_parenthesis() -> None:
    given = "(<code>int</code>, default:\n  <code>0</code>\n) and <code>a</code> (b)"
    assert without_gaps(given) == "(<code>int</code>, default:\n  <code>0</code>) and <code>a</code> (b)"

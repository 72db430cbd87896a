"""Results and commands: prose wraps, columns stay together."""

from __future__ import annotations

import pytest
from site_builder.text_blocks import with_marked_blocks

COLUMNS = "checkpoint     written\ncheckpoint-5   2026-11-23"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("the checkpoint of step 5 could not be written: no space left", " prose"),
        ("TrainOutput(global_step=5)\ncurves:       tensorboard --logdir runs/demo", " prose"),
        ("a tree\n  of folders", " prose"),
        (COLUMNS, ""),
        ("A ──► B", ""),
        (f"{COLUMNS}  {'x' * 85}", " broad"),
        (f"{COLUMNS}\n{'x' * 85}", ""),
        ("a  &lt;b&gt;" + "&lt;" * 70, ""),
    ],
)
def test_a_block_is_marked_by_what_it_holds(text: str, kind: str) -> None:
    block = '<div class="language-text highlight{}"><pre><span></span><code>' + text + "\n</code></pre></div>"
    assert with_marked_blocks(block.format("")) == block.format(kind)


def test_commands_are_marked_by_their_comments() -> None:
    block = '<div class="language-sh highlight{}"><pre><span></span><code>{}\n</code></pre></div>'
    for text, kind in (("ls  -l", " prose"), ("ls    # all", ""), (f"ls{' ' * 50}# {'x' * 50}", " broad")):
        assert with_marked_blocks(block.format("", text)) == block.format(kind, text)


def test_other_code_stays_as_it_is() -> None:
    block = '<div class="language-python highlight"><pre><span></span><code>a  = 1\n</code></pre></div>'
    assert with_marked_blocks(block) == block

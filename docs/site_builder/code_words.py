"""Keeps the words of inline code in one piece: browsers break lines after hyphens, as in `--max-` and `restarts`.

Also removes the space that the generator leaves between a default and its parenthesis.
"""

from __future__ import annotations

import html
import re

_LONGEST = 30
"""Characters that fit on a phone."""

_PIECES = {"short": _LONGEST, "long": 2 * _LONGEST}
"""Characters that fit on a line of a phone, and of a wide screen."""

_CODE = re.compile(r"(<code>)([^<\n]*)(</code>)")
_GAP = re.compile(r"(?<=</code>)\s+(?=\))")
_WORD = re.compile(r"(?:&\w+;|[^\s&])*-(?:&\w+;|[^\s&])*")
_HEAD = re.compile(r"-+\w[^\W_]*(?:-[^\W_]+)?")


def with_whole_words(page: str, right_to_left: bool = False) -> str:
    """Return the HTML of a page with words of inline code that have a hyphen marked as unbreakable.

    Of a word that is too long for a phone, only the beginning of an option is. The text stays as it is, for copies.

    Args:
        page: The HTML.
        right_to_left: Whether the page's text is. The second line of broken code would begin on the other side, so all
            code that fits on a line is marked too: `short` code everywhere, `long` code on a wide screen.
    """

    def marked(code: re.Match[str]) -> str:
        length = len(html.unescape(code[2]))
        kinds = [kind for kind, longest in _PIECES.items() if length <= longest and right_to_left]
        opening = f'<code class="{kinds[0]}">' if kinds else code[1]
        return f"{opening}{_WORD.sub(_marked, code[2])}{code[3]}"

    return _CODE.sub(marked, page)


def without_gaps(page: str) -> str:
    """Return the HTML of a page without space between inline code and a closing parenthesis."""
    return _GAP.sub("", page)


def _marked(word: re.Match[str]) -> str:
    if len(word[0]) <= _LONGEST:
        return f'<span class="word">{word[0]}</span>'
    head = _HEAD.match(word[0])
    return word[0] if head is None else f'<span class="word">{head[0]}</span>{word[0][head.end() :]}'

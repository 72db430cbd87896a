"""Keeps the words of inline code in one piece: browsers break lines after hyphens, as in `--max-` and `restarts`.

Also removes the space that the generator leaves between a default and its parenthesis.
"""

from __future__ import annotations

import re

_LONGEST = 30
"""Characters that fit on a phone."""

_CODE = re.compile(r"(<code>)([^<\n]*)(</code>)")
_GAP = re.compile(r"(?<=</code>)\s+(?=\))")
_WORD = re.compile(r"(?:&\w+;|[^\s&])*-(?:&\w+;|[^\s&])*")
_HEAD = re.compile(r"-+\w[^\W_]*(?:-[^\W_]+)?")


def with_whole_words(page: str) -> str:
    """Return the HTML of a page with words of inline code that have a hyphen marked as unbreakable.

    Of a word that is too long for a phone, only the beginning of an option is. The text stays as it is, for copies.
    """
    return _CODE.sub(lambda code: f"{code[1]}{_WORD.sub(_marked, code[2])}{code[3]}", page)


def without_gaps(page: str) -> str:
    """Return the HTML of a page without space between inline code and a closing parenthesis."""
    return _GAP.sub("", page)


def _marked(word: re.Match[str]) -> str:
    if len(word[0]) <= _LONGEST:
        return f'<span class="word">{word[0]}</span>'
    head = _HEAD.match(word[0])
    return word[0] if head is None else f'<span class="word">{head[0]}</span>{word[0][head.end() :]}'

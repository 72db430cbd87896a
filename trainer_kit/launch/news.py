"""`News`: announcement of a failure among the launchers of a run."""

from __future__ import annotations

import json
from typing import NamedTuple

from trainer_kit.errors import ProcessFailed

FAILED = "trainer_kit/failed"
"""Key of the store under which the first announcement of a start stands."""


class News(NamedTuple):
    """Announcement of a failure.

    Attributes:
        failure: The first failure of the run.
        goes_on: Whether the machines restart their ranks; None: each decides, by the failures that all have counted.
    """

    failure: ProcessFailed
    goes_on: bool | None

    def to_json(self) -> str:
        """Return the text of the store."""
        failure = self.failure
        facts = [failure.message, failure.rank, failure.exit_code, failure.traceback, failure.tail]
        return json.dumps([facts, self.goes_on])

    @classmethod
    def from_json(cls, text: str | bytes) -> News:
        """Read the text of the store."""
        facts, goes_on = json.loads(text)
        return cls(ProcessFailed(*facts), goes_on)

"""What the launchers of a run announce to one another: `News` of a failure, or a `Change` of machines."""

from __future__ import annotations

import json
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from trainer_kit.errors import ProcessFailed

FAILED, CHANGE = "trainer_kit/failed", "trainer_kit/change"
"""Keys of the store under which the first announcement of a start stands."""

LOST = "trainer_kit/lost"
"""Key under which the names of machines stand that give no sign of life and have not left."""

OPEN = "trainer_kit/open"
"""Key under which the digest of the training stands that newcomers can join in the process; "" if they cannot."""

OUTCOME = "trainer_kit/outcome"
"""Key under which the first of two values stands: `BEGINS` once all machines have come, `GONE` if one cannot come."""

BEGINS, GONE = "begins", "gone"


def opening(running: Store) -> str | None:
    """Return the digest of the training that newcomers can join, "" if they cannot; None: not known yet.

    Args:
        running: The keys of the membership that runs.
    """
    return running.get(OPEN).decode() if running.check([OPEN]) else None


def final_failure(past: Store) -> str:
    """Return the text of the `News` of the failure that ended the run; "" if none did.

    Args:
        past: The keys of a membership.
    """
    text = past.get(FAILED).decode() if past.check([FAILED]) else ""
    return "" if not text or News.from_json(text).goes_on else text


class Change(NamedTuple):
    """Announcement of a machine that joins or leaves.

    Attributes:
        text: What happens, for the user.
        is_joining: Whether a machine joins, so that the others end their ranks; one that leaves has ended its own.
        in_process: Whether the ranks stay in their processes.
    """

    text: str
    is_joining: bool
    in_process: bool = False

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Change:
        """Read the text of the store."""
        return cls(*json.loads(text))


class News(NamedTuple):
    """Announcement of a failure.

    Attributes:
        failure: The first failure of the run.
        goes_on: Whether the machines restart their ranks.
        is_loss: Whether it follows from the loss of a machine, so that it counts as no failure.
        host: Machine of the rank that failed; "" if it counts as no failure, or the run has one machine.
    """

    failure: ProcessFailed
    goes_on: bool
    is_loss: bool = False
    host: str = ""

    def to_json(self) -> str:
        """Return the text of the store."""
        failure = self.failure
        facts = [failure.message, failure.rank, failure.exit_code, failure.traceback, failure.tail]
        return json.dumps([facts, self.goes_on, self.is_loss, self.host])

    @classmethod
    def from_json(cls, text: str | bytes) -> News:
        """Read the text of the store."""
        facts, *rest = json.loads(text)
        return cls(ProcessFailed(*facts), *rest)

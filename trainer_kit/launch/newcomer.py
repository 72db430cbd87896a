"""`Newcomer`: how a machine that comes to a run under way joins it: its ranks prepare before they take a place."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from trainer_kit.launch.elastic_rendezvous import ElasticRendezvous
from trainer_kit.launch.membership import Readiness
from trainer_kit.launch.published import Published
from trainer_kit.utils.new_place import NEW
from trainer_kit.utils.units import pluralize

_OPENING_SECONDS = 60.0  # for a training that has just changed its machines to take in newcomers again
_PATIENCE_SECONDS = 5.0  # until the user sees what the ranks wait for


class Outlook(enum.Enum):
    """What becomes of ranks that prepare."""

    STAY = enum.auto()
    """They prepare, or wait for a place."""

    JOIN = enum.auto()
    """They have a place, and join the others."""

    START_AGAIN = enum.auto()
    """They end, and start again with those of the other machines."""


class Newcomer:
    """A machine that comes to a run under way.

    Its ranks prepare the training alone. When all of them wait for a place in the same training as that of the run, the
    machine asks for one, so that the others stay in their processes.

    Args:
        rendezvous: Where it meets the others.
        say: Shows a sentence to the user.
    """

    def __init__(self, rendezvous: ElasticRendezvous, say: Callable[[str], None]) -> None:
        self._rendezvous, self._say = rendezvous, say
        rendezvous.can_prepare = True
        self._known_at = self._hint_at = 0.0

    def begin(self) -> Published | None:
        """Return the membership whose training the ranks prepare; None if the machine goes to the meeting first.

        A machine that waits for a place after that asks again once the run takes in newcomers: see `IsNewcomerError`.

        Raises:
            OSError: See `ElasticRendezvous.next_rendezvous`.
            CutOffError: See `ElasticRendezvous.next_rendezvous`.
        """
        rendezvous = self._rendezvous
        try:
            may_prepare = rendezvous.can_prepare and not rendezvous.is_outvoted()
            running = rendezvous.running() if may_prepare else None
            if running is None:
                return None
            digest = rendezvous.open_for(running)
            if digest == "":
                return None
            rendezvous.readiness = Readiness.PREPARING
            if digest is None:  # the meeting waits for a training that has just changed its machines
                return None
            rendezvous.announce()
        except RuntimeError:  # the store is gone, or another one is better
            self._leave_store()
            return None
        except RendezvousGracefulExitError:  # the meeting reports the end
            rendezvous.readiness = Readiness.NOT_STARTED
            return None
        count = len(running.membership.machines)
        verb = "runs" if count == 1 else "run"
        self._say(f"{count} {pluralize('machine', count)} {verb}; the processes of this one prepare to join in")
        return running

    def outlook(self, words: str | None) -> Outlook:
        """Return what becomes of the ranks.

        Args:
            words: Words with which all ranks wait for a place; None if some still prepare.

        Raises:
            OSError: See `ElasticRendezvous.next_rendezvous`.
            CutOffError: See `ElasticRendezvous.next_rendezvous`.
            RendezvousGracefulExitError: If the run ends without this machine.
        """
        rendezvous = self._rendezvous
        try:
            outlook = self._outlook(words)
            if outlook is Outlook.START_AGAIN:
                rendezvous.readiness = Readiness.NOT_STARTED
                rendezvous.announce()  # the ranks may take long to end
        except RuntimeError:  # the store is gone, or another one is better
            self._leave_store()
            outlook = Outlook.START_AGAIN
        return outlook

    def _leave_store(self) -> None:
        """Let the meeting find another store; a newcomer stays one, unless the others are too few without it."""
        rendezvous = self._rendezvous
        is_newcomer = rendezvous.readiness in (Readiness.PREPARING, Readiness.READY)
        rendezvous.readiness = Readiness.PREPARING if is_newcomer else Readiness.NOT_STARTED
        rendezvous.leave_store()

    def withdraw(self) -> None:
        """Take no place, since the ranks end."""
        if self._rendezvous.readiness is Readiness.READY:
            self._rendezvous.readiness = Readiness.PREPARING
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._rendezvous.announce()

    def _outlook(self, words: str | None) -> Outlook:
        rendezvous, now = self._rendezvous, time.monotonic()
        is_ready = rendezvous.readiness is Readiness.READY
        running = rendezvous.running()
        if running is None:
            return Outlook.JOIN if is_ready else Outlook.START_AGAIN
        if words is None:
            self._known_at = now
            return Outlook.STAY
        digest = rendezvous.open_for(running)
        if digest is None and now - self._known_at < _OPENING_SECONDS:
            return Outlook.STAY
        if not digest or words != f"{NEW}{digest}":
            reason = "whose training differs from that of the run or is at another place of the script"
            why = f", {reason}" if digest else " now"
            self._say(f"the run cannot take in these processes{why}: they start again with those of the other machines")
            rendezvous.can_prepare = not digest
            return Outlook.START_AGAIN
        self._known_at = now
        if not is_ready:
            rendezvous.readiness, self._hint_at = Readiness.READY, now + _PATIENCE_SECONDS
            rendezvous.announce()
        elif now >= self._hint_at:
            self._say("ready, and waiting for a place in the run")
            self._hint_at = float("inf")
        return Outlook.STAY

"""What stands in the store of a run: `Facts` of each machine; `Published`, `Here` and `End` of its keeper.

Keys of the store. Each machine takes a number N from `machines`, writes `machine/N` and adds 1 to `beat/N` again and
again. The keeper publishes `membership`, who is `here`, the port of its `presence`, and `ended` when the run is over or
its own machine gives up. What machines exchange about a membership is under its number, such as `3/trainer_kit/change`.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import NamedTuple

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.membership import Membership, Readiness, Right
from trainer_kit.utils.units import format_duration, join_names

MACHINES, MEMBERSHIP, ENDED, HERE, PRESENCE = "machines", "membership", "ended", "here", "presence"
BEGUN = "begun"
"""Number of the first membership of the store that began."""


class End(str, Enum):
    """How a run has ended for the machines of a store; where they say different things, the first one here counts."""

    OVER = "over"
    """The ranks have done their work."""

    LEFT = "left"
    """The ranks have left because of a signal."""

    FAILED = "failed"
    """A rank has failed, or a launcher."""

    TIMED_OUT = "timed out"
    """The machine with the store has waited for others in vain."""

    GIVEN_UP = "given up"
    """They may not continue, but others may."""


def machine_key(number: int) -> str:
    """Return the key of what a machine says about itself."""
    return f"machine/{number}"


def beat_key(number: int) -> str:
    """Return the key of a machine's signs of life."""
    return f"beat/{number}"


class Facts(NamedTuple):
    """What a machine says about itself; see `Machine`.

    Attributes:
        id: Unique ID of the launcher.
        host: Host name.
        past: Its memberships.
        has_claimed: Whether the output folder has been claimed.
        is_candidate: Whether it can serve the store.
        end: How the run has ended for the machine; None as long as it is there.
        readiness: What its ranks do.
        stays: Whether they wait in their processes.
    """

    id: str
    host: str
    past: tuple[Membership, ...] = ()
    has_claimed: bool = False
    is_candidate: bool = False
    end: End | None = None
    readiness: Readiness = Readiness.NOT_STARTED
    stays: bool = False

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Facts:
        """Read the text of the store."""
        own, host, past, has_claimed, is_candidate, end, readiness, stays = json.loads(text)
        memberships, how = tuple(map(Membership.of, past)), None if end is None else End(end)
        return cls(own, host, memberships, has_claimed, is_candidate, how, Readiness(readiness), stays)


class Published(NamedTuple):
    """A membership as the machines read it.

    Attributes:
        membership: The membership.
        numbers: Numbers of its machines in this store, by place.
        bases: See `Formed`.
        right: See `Formed`.
        gone: Hosts that belonged to the membership before, but not to this one.
        joined: Hosts that belong to this one, but not to the one before; empty for the first.
        port: Port of the store of its ranks, on the machine that serves this store.
    """

    membership: Membership = Membership()
    numbers: tuple[int, ...] = ()
    bases: tuple[Membership, ...] = ()
    right: Right = Right.MAJORITY
    gone: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    port: int = 0

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Published:
        """Read the text of the store."""
        membership, numbers, bases, right, gone, joined, port = json.loads(text)
        past = tuple(map(Membership.of, bases))
        return cls(Membership.of(membership), tuple(numbers), past, Right(right), tuple(gone), tuple(joined), port)

    def for_ranks(self) -> str:
        """Return the membership as its ranks read it, see `environment.membership`."""
        now, after = self.membership, self.bases[0].number if self.bases else 0
        return f"{now.run}/{now.number}/{after}/{int(self.right is Right.OTHER_HALF)}"

    def describe(self, config: LaunchConfig) -> list[str]:
        """Return what the user needs to know of it, where the number of machines may change.

        Args:
            config: Launch configuration.
        """
        if config.min_nodes is None:
            return []
        of = f"{len(self.membership.machines)} of {config.num_nodes} machines"
        if self.bases:
            return [f"{self._describe_change()}: {of} continue"] if self.gone or self.joined else []
        first, *others = config.candidates
        limit = format_duration(config.meeting_seconds)
        if others:
            then = f"{first} serves the store, and if it is lost, the next one of {', '.join(others)}"
        else:
            then = f"if the one at {first} is lost, which serves the store, the others wait up to {limit} for it"
        return [f"{of}, {config.min_nodes} are enough; {then}"]

    def _describe_change(self) -> str:
        parts = []
        if self.gone:
            parts.append(f"{', '.join(self.gone)} {'is' if len(self.gone) == 1 else 'are'} gone")
        if self.joined:
            parts.append(f"{', '.join(self.joined)} {'has' if len(self.joined) == 1 else 'have'} joined")
        return " and ".join(parts)


class Here(NamedTuple):
    """The machines that wait in a store.

    Attributes:
        total: Their number.
        hosts: Hosts of those that belonged to the newest membership, by place.
        of: Number of machines of that membership.
        has_first: Whether its first machine waits.
        may_follow: Whether they may form the next membership if they are enough.
    """

    total: int = 0
    hosts: tuple[str, ...] = ()
    of: int = 0
    has_first: bool = False
    may_follow: bool = True

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Here:
        """Read the text of the store."""
        total, hosts, *rest = json.loads(text)
        return cls(total, tuple(hosts), *rest)

    def describe(self, own: str) -> str:
        """Return who is here of the newest membership.

        Args:
            own: Host of the machine that says so.
        """
        names = ["this machine"] * (own in self.hosts) + [host for host in self.hosts if host != own]
        if not names:
            return f"none of {self.of} machines has come"
        is_half = 2 * len(self.hosts) == self.of and not self.has_first
        who = f"{join_names(names)} {'is' if len(names) == 1 else 'are'}"
        return f"{who} {len(self.hosts)} of {self.of}{', without the first one' if is_half else ''}"

    def missing(self, own: str, config: LaunchConfig) -> str:
        """Return whom the machines wait for.

        Args:
            own: See `describe`.
            config: Launch configuration.
        """
        if not self.may_follow:
            return f"the other machines, since {self.describe(own)}"
        least = f"at least {config.min_nodes}" if config.min_nodes else config.num_nodes
        return f"a machine ({self.total} of {least} came)"

"""`MembershipHistory`: the machines that have trained a run, and what their changes have cost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Members(NamedTuple):
    """The machines and processes that train a run.

    Attributes:
        machines: Number of machines.
        processes: Number of processes on all of them.
        launch: ID of a launch whose machines may change; empty for any other.
        number: Number of its membership; 0 if the launcher gives none.
        hosts: Host names of its machines, sorted; empty if the machines cannot change.
        launchers: IDs of their launchers, in the same order; empty if they are not known.
    """

    machines: int = 1
    processes: int = 1
    launch: str = ""
    number: int = 0
    hosts: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()

    def without(self, others: Members) -> tuple[str, ...]:
        """Return the hosts of the machines that are not among others; one that has started again is another one."""
        are_known = all(len(each.launchers) == len(each.hosts) for each in (self, others))
        own, rest = (
            Counter(zip(each.hosts, each.launchers if are_known else each.hosts, strict=True))
            for each in (self, others)
        )
        return tuple(sorted(host for host, _ in (own - rest).elements()))


@dataclasses.dataclass(frozen=True)
class MembershipEntry:
    """A change of the machines or processes that train a run.

    - `number` (count): Number of the membership, from 1. It increases over the run, and may skip numbers.
    - `machines` (machines): Machines from now on.
    - `processes` (processes): Processes on all of them.
    - `processes_before` (processes): Processes before the change; 0 in the first membership.
    - `machines_before` (machines): Machines before the change; 0 in the first membership.
    - `lost` (host names): Machines that are gone, lost or left; only if the launcher lets machines change.
    - `joined` (host names): Machines that have come; only if the launcher lets machines change.
    - `cause` (text): What the processes noticed of a loss; empty if it is not known.
    - `pause` (s): Time from the last work before the change to the first work after it.
    - `again` (steps): Steps that the change made the run take again, as far as they were recorded.
    - `in_process` (true or false): Whether the processes stayed, instead of new ones that resumed from a checkpoint.
    """

    number: int
    machines: int
    processes: int
    processes_before: int = 0
    machines_before: int = 0
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    cause: str = ""
    pause: float = 0.0
    again: int = 0
    in_process: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MembershipEntry:
        """Return the entry with these fields; other names are ignored."""
        given = {each.name: values[each.name] for each in dataclasses.fields(cls) if each.name in values}
        return cls(**given | {name: tuple(given[name]) for name in ("lost", "joined") if name in given})


class MembershipHistory:
    """The memberships of a run, over all its starts.

    Attributes:
        entries: The memberships; the first is that of the run's beginning.
        members: The machines and processes that train now.
        full: Full size of the run: the largest number of processes since the launch.
        steps_again: Steps that were taken again, after restarts and losses, as far as they were recorded.
        discarded: Those of them that the last resume has discarded.
        latest: The entry of the last `record`; None if it noted no change.
    """

    def __init__(self) -> None:
        self.entries: list[MembershipEntry] = []
        self.members = Members()
        self.full = 1
        self.steps_again = self.discarded = 0
        self.latest: MembershipEntry | None = None

    @property
    def has_changed(self) -> bool:
        """Whether the run has had more than one membership."""
        return len(self.entries) > 1

    @property
    def part(self) -> float:
        """Part of the full size that trains now; 1 unless machines may change."""
        return self.members.processes / self.full if self.members.launch else 1.0

    @property
    def lost(self) -> int:
        """Number of times that a machine was lost or left."""
        return sum(len(entry.lost) for entry in self.entries)

    @property
    def joined(self) -> int:
        """Number of times that a machine has come."""
        return sum(len(entry.joined) for entry in self.entries)

    @property
    def returned(self) -> int:
        """Number of times that a machine has come again."""
        away, returned = Counter[str](), 0
        for entry in self.entries:
            away += Counter(entry.lost)
            returned += (away & Counter(entry.joined)).total()
            away -= Counter(entry.joined)
        return returned

    @property
    def pause(self) -> float:
        """Seconds between work before a change and work after it."""
        return sum(entry.pause for entry in self.entries)

    def record(
        self, members: Members, cause: str = "", pause: float = 0.0, again: int = 0, in_process: bool = False
    ) -> None:
        """Note who trains from now on; `latest` becomes the entry of a change, or None.

        Args:
            members: The machines and processes.
            cause: See `MembershipEntry`, as the others.
            pause: Seconds.
            again: Steps. They must be part of `steps_again` already.
            in_process: Whether the processes stayed.
        """
        before, self.members, self.latest = self.members, members, None
        is_same_launch = before.launch == members.launch
        self.full = max(self.full, members.processes) if self.entries and is_same_launch else members.processes
        sizes = members.machines, members.processes
        if not self.entries:
            self.entries.append(MembershipEntry(max(1, members.number), *sizes))
            return
        lost = before.without(members) if is_same_launch else ()
        joined = members.without(before) if is_same_launch else ()
        if sizes == (before.machines, before.processes) and not (lost or joined):
            return
        number = max(members.number, self.entries[-1].number + 1)
        old = before.processes, before.machines
        self.latest = MembershipEntry(number, *sizes, *old, lost, joined, cause, pause, again, in_process)
        self.entries.append(self.latest)

    def state_dict(self) -> dict[str, Any]:
        # Without defaults, since most runs have one entry.
        members = {name: value for name, value in self.members._asdict().items() if value != _ALONE[name]}
        return {
            "entries": [_shortened(entry) for entry in self.entries],
            "members": members,
            "full": self.full,
            "again": self.steps_again,
        }

    def go_on(self, state: Mapping[str, Any] | None, steps: int, logged: Iterable[Mapping[str, Any]]) -> None:
        """Restore the history of a checkpoint.

        Args:
            state: Result of `state_dict`; None: the checkpoint has none.
            steps: Steps that the run had recorded after the checkpoint.
            logged: Fields of the memberships that it had recorded after the checkpoint, with their "hosts".
        """
        self.discarded = steps
        if state is None:
            self.steps_again = steps
            return
        self.entries = [MembershipEntry.from_dict(entry) for entry in state["entries"]]
        members = state["members"]
        self.members = Members(**members | {key: tuple(members.get(key, ())) for key in ("hosts", "launchers")})
        self.full, self.steps_again = state["full"], state["again"] + steps
        for values in logged:
            entry = MembershipEntry.from_dict(values)
            hosts = Counter(self.members.hosts) - Counter(entry.lost) + Counter(entry.joined)
            self.members = self.members._replace(
                machines=entry.machines, processes=entry.processes, hosts=tuple(sorted(hosts.elements())), launchers=()
            )
            self.full = max(self.full, entry.processes)
            self.entries.append(entry)
            if entry.in_process:  # what the others took again was recorded as steps, too
                self.steps_again += entry.again


_ALONE = Members()._asdict()


def _shortened(entry: MembershipEntry) -> dict[str, Any]:
    """Return the fields that are not their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(entry)}
    return {name: value for name, value in entry.to_dict().items() if value != defaults[name]}

"""Rendezvous of launchers in order of arrival, of which some may be lost and others come later."""

from __future__ import annotations

import contextlib
import math
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_kit.config import environment
from trainer_kit.errors import CutOffError, ProcessesLeft
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.link import STILL_TRAINING, Chance, IsNewcomerError, Link
from trainer_kit.launch.meeting_store import MeetingStore
from trainer_kit.launch.membership import Membership, Readiness, Right
from trainer_kit.launch.news import BEGINS, GONE, OUTCOME
from trainer_kit.launch.published import BEGUN, ENDED, End, Facts, Here, Published
from trainer_kit.launch.rendezvous import Waiting
from trainer_kit.utils.membership_claim import read_claim
from trainer_kit.utils.units import join_names

_LOOK_SECONDS = 1.0
_MEETING_SECONDS = 30.0  # for the machines of a new membership to come, and to exchange their first words
_ARRIVAL_LOOK_SECONDS = 0.02
_TAKEN = "other machines hold the output folder and continue without this one"


class ElasticRendezvous(RendezvousHandler):
    """Rendezvous in order of arrival, for `min_nodes` to `num_nodes` machines.

    The machine that serves the store decides who trains together (see `Keeper`). Machines that stay keep their order,
    so that the main process stays where it is; those that join come last. A machine that is too many waits until it is
    needed. If the store is lost, the first candidate that is left serves the next one. Only the first candidate of all
    serves a store for a new run: another one that is started again joins what is there.

    Unlike torch's dynamic rendezvous, it compares no clocks of different machines, which may be seconds apart, and
    takes a machine that comes again with the same address and process ID for a new one.

    Args:
        config: Launch configuration.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the config comes from command-line options.

    Attributes:
        starts: Number of earlier memberships; 0 if none of them began.
        membership: The membership for the ranks, see `environment.membership`.
        is_lasting: Whether the store outlives a restart of the ranks.
        readiness: What the ranks do.
        stays: Whether the ranks wait for the next membership in their processes.
        can_prepare: Whether the ranks can prepare to join a run under way, where this machine comes as a newcomer.
    """

    is_lasting = True

    def __init__(
        self, config: LaunchConfig, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        self._config = config
        self._store = MeetingStore(config)
        self._say = say
        self._is_stopped = is_stopped
        self._until = Waiting(config.meeting_seconds, say, is_stopped, by_command).until
        self._outside = Waiting(math.inf, say, is_stopped, by_command).until
        self._together = Waiting(_MEETING_SECONDS, say, is_stopped, by_command).until
        self._id = uuid.uuid4().hex
        self._past: tuple[Membership, ...] = ()
        self._published = Published()
        self._unsaid: list[str] = []
        self._has_claimed = self._is_outvoted = self._hands_over = self._has_begun = False
        self.can_prepare = self.stays = False
        self.readiness = Readiness.NOT_STARTED
        self._end = End.OVER
        self._next_look = 0.0
        self.starts = 0
        self.membership = ""

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of the launchers."""
        return True

    @property
    def serves(self) -> bool:
        """Whether this machine serves the store."""
        return self._store.served is not None

    @property
    def store_number(self) -> int:
        """Number of stores that this machine has met the others at."""
        return self._store.number

    def answers(self) -> bool:
        """Return whether the store answers."""
        return self._store.answers()

    def alive(self) -> int:
        """Return the number of machines that train together, without those that are gone if this one can tell."""
        served = self._store.served
        return served.keeper.alive() if served is not None else self._config.num_nodes

    def waiting(self) -> int:
        """Return the number of machines that wait for a place in the run.

        Raises:
            RuntimeError: If the connection to the store is broken.
        """
        return 0 if self._store.link is None else self._store.link.here().total

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines.

        Returns:
            The store, this machine's place and the number of machines.

        Raises:
            OSError: If too few machines come, or a port or address cannot be used; the message says which.
            CutOffError: If other machines may still be training without this one.
            RendezvousGracefulExitError: If the run ends, see `Link.check_end`.
            IsNewcomerError: If the run has continued without this machine, whose ranks can prepare to join it.
        """
        self._read_claim()
        if self._is_outvoted:
            self.leave_store()
        while True:
            try:
                link = self._linked()
                if self.can_prepare and self.stays and self.running() is not None:
                    raise IsNewcomerError
                if self.readiness is Readiness.TRAINING:
                    self.readiness = Readiness.NOT_STARTED
                link.announce(self._facts())
                published = self._meet(link)
                self.readiness = Readiness.TRAINING
                self.announce()
                self._enter(published)
                store = PrefixStore(str(published.membership.number), link.store)
                store.set_timeout(timedelta(seconds=_MEETING_SECONDS))
                if self._begin(link, store, published.membership):
                    break
            except RuntimeError:  # the connection to the store broke, or another one is better
                if self.serves and len(self._config.candidates) == 1:
                    raise
                self.leave_store()
        info = RendezvousStoreInfo(self._store.address, published.port)
        machines = published.membership.machines
        return RendezvousInfo(store, machines.index(self._id), len(machines), info)

    def confirm(self) -> None:
        """Note that all machines have heard of the membership.

        One with half of the machines counts only after its main process has claimed the output folder.
        """
        if self._published.right is Right.MAJORITY:
            self._past = (self._published.membership,)

    def report(self) -> None:
        """Say who has met, once it is known that they continue."""
        while self._unsaid:
            self._say(self._unsaid.pop(0))

    def is_outvoted(self) -> bool:
        """Return whether the ranks ended since other machines hold the output folder."""
        self._read_claim()
        return self._is_outvoted

    def can_leave(self) -> bool:
        """Return whether the other machines can continue without this one."""
        self._read_claim()
        served = self._store.served
        return served is None or served.keeper.can_go_on_without(self._id, self._has_claimed)

    def expect_to_leave(self) -> None:
        """Leave the store to the other machines at the end, since this machine leaves and they continue."""
        self._hands_over = True

    def _read_claim(self) -> None:
        """Read whether the main process could claim the output folder."""
        path = environment.progress_file()
        number, is_held = (0, False) if path is None else read_claim(Path(path))
        if not self._past or number != self._past[-1].number:
            return
        if is_held:
            self._has_claimed, self._past = True, self._past[-1:]
        elif not self._is_outvoted:
            self._is_outvoted, self._past = True, self._past[:1]
            self._say(_TAKEN)

    def _facts(self, end: End | None = None) -> Facts:
        facts = self._past, self._has_claimed, self._store.is_candidate, end, self.readiness, self.stays
        return Facts(self._id, socket.gethostname(), *facts)

    # Coming to a run that is under way

    def running(self) -> Published | None:
        """Return the membership that runs without this machine; None without one, or if this machine has its place.

        Raises:
            RuntimeError: If the connection to the store is broken, or this machine should wait at another one.
            OSError, CutOffError, RendezvousGracefulExitError: See `next_rendezvous`.
        """
        now = (published := self._newest(self._linked())).membership
        return None if now.number <= self._last or self._id in now.machines else published

    def open_for(self, running: Published) -> str | None:
        """Return the digest of the training that newcomers can join, "" if they cannot; None: not known yet.

        Args:
            running: The membership that runs.

        Raises:
            RuntimeError: If the connection to the store is broken.
        """
        return self._linked().open_for(running.membership.number)

    def announce(self) -> None:
        """Announce what this machine does.

        Raises:
            RuntimeError: If the connection to the store is broken.
        """
        self._linked().announce(self._facts())

    # The store

    @property
    def _last(self) -> int:
        """Number of this machine's last membership; 0 before the first."""
        return self._past[-1].number if self._past else 0

    def leave_store(self) -> None:
        """Leave the store, and end it if this machine serves it."""
        self._store.leave()

    def _linked(self) -> Link:
        """Return the connection to the store; wait for one without it."""
        if self._store.link is None:
            self._wait_for_store()
        assert self._store.link is not None
        return self._store.link

    def _wait_for_store(self) -> None:
        find = self._store.find_better if self._is_outvoted else self._store.find
        candidates, port = self._config.candidates, self._config.port
        whom = f"the first machine at {candidates[0]}:{port}"
        if len(candidates) > 1:
            whom = f"one of the machines {', '.join(candidates)} at port {port}"
        try:
            self._until(lambda: find(self._last), whom)
        except TimeoutError as error:
            if not self._past or (len(candidates) == 1 and not self._is_outvoted):
                raise
            self._end = End.GIVEN_UP
            last = self._past[-1]
            here = Here(1, (socket.gethostname(),), len(last.machines), last.machines[0] == self._id)
            where = _TAKEN if self._is_outvoted else here.describe(socket.gethostname())
            raise CutOffError(f"{where}: {STILL_TRAINING}") from error

    # The meeting

    def _meet(self, link: Link) -> Published:
        """Wait for the next membership of this machine."""
        host = socket.gethostname()

        def has_newer() -> bool:
            return self._newest(link).membership.number > self._last

        try:
            self._until(has_newer, lambda: link.here().missing(host, self._config))
        except TimeoutError as error:
            if (here := link.here()).may_follow:
                self._end = End.TIMED_OUT
                raise
            self._end = End.GIVEN_UP
            raise CutOffError(f"{here.describe(host)}: {STILL_TRAINING}") from error
        return self._wait_for_place(link)

    def _wait_for_place(self, link: Link) -> Published:
        """Return the membership in which this machine has its place.

        Raises:
            IsNewcomerError: If its ranks can prepare to join the one that runs.
        """
        whom, seen, newest = "a place in the run, which has its machines", Chance.LATER, Published()

        def is_settled() -> bool:
            nonlocal newest, seen
            newest = self._newest(link)
            may_join = self.can_prepare and not self._is_outvoted and self._id not in newest.membership.machines
            seen = link.chance(newest, may_join)
            return seen is not Chance.LATER and (seen is not Chance.NONE or self.readiness is Readiness.PREPARING)

        self._outside(is_settled, whom)
        if seen is Chance.NONE:
            self.readiness = Readiness.NOT_STARTED
            self.announce()
            self._outside(is_settled, whom)
        if seen is Chance.OPEN:
            raise IsNewcomerError
        return newest

    def _newest(self, link: Link) -> Published:
        self._check(link)
        return link.published()

    def _enter(self, published: Published) -> None:
        """Belong to a membership, which counts from `confirm` on."""
        self._unsaid += published.describe(self._config)
        self._published, self._past = published, (*published.bases, published.membership)
        self._is_outvoted = self._hands_over = False
        self._store.settle()
        self.membership = published.for_ranks()

    def _begin(self, link: Link, store: Store, now: Membership) -> bool:
        """Wait for all machines of a membership; return False if one is gone, so that the others meet again."""
        keys = [f"trainer_kit/come-{place}" for place in range(len(now.machines))]
        store.set(keys[now.machines.index(self._id)], "")

        def is_settled() -> bool:
            if store.check([OUTCOME]):
                return True
            self._check(link, looks_elsewhere=False)
            return store.check(keys) and bool(store.compare_set(OUTCOME, "", BEGINS))

        def who() -> str:
            missing = [host for host, key in zip(now.hosts, keys, strict=True) if not store.check([key])]
            return join_names(missing) or "the other machines"

        try:
            self._together(is_settled, who, _ARRIVAL_LOOK_SECONDS)
        except TimeoutError:
            store.compare_set(OUTCOME, "", GONE)
        if store.get(OUTCOME).decode() != BEGINS:
            return False
        first = int(link.store.compare_set(BEGUN, "", str(now.number)))
        self.starts = now.number - 1 if self._has_begun or first < now.number else 0
        self._has_begun = True
        return True

    def _check(self, link: Link, looks_elsewhere: bool = True) -> None:
        """Raise an error if the run has ended, the store is gone, or this machine should wait at another one."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            if not link.is_alive():
                raise RuntimeError("the store does not answer")
            if looks_elsewhere and len(self._config.candidates) > 1 and self._store.has_better(self._last):
                raise RuntimeError("this machine should wait at another store")
        if looks_elsewhere or link.store.check([ENDED]):
            link.check_end(self._past)

    def leave(self, error: BaseException | None) -> None:
        """Leave the run.

        Args:
            error: What has ended the launcher of this machine; None if the ranks have done their work.
        """
        if error is not None and self._end is End.OVER:
            self._end = End.LEFT if isinstance(error, (ProcessesLeft, InterruptedError)) else End.FAILED
        self.shutdown()

    def shutdown(self) -> bool:
        """Leave the run, see `leave`."""
        store = self._store
        if store.link is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                if store.answers():
                    store.link.announce(self._facts(self._end))
            store.link.stop()
            store.link = None
        if store.served is not None and self._hands_over:
            store.served.hand_over(self._id, self._is_stopped, self._end)
        elif store.served is not None:
            store.served.stop(self._is_stopped, self._end)
        store.served = None
        return True

    def get_backend(self) -> str:
        """Return "c10d"."""
        return "c10d"

    def is_closed(self) -> bool:
        """Return False: `next_rendezvous` reports when the run has ended."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the run ends when its machines have left."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the agent asks `Machines` about machines that join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._config.run_id

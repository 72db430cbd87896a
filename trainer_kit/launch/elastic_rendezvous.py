"""Rendezvous of launchers in order of arrival, of which some may be lost and others come later."""

from __future__ import annotations

import contextlib
import math
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_kit.config import environment
from trainer_kit.errors import CutOffError, ProcessesLeft
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.link import STILL_TRAINING, Chance, IsNewcomerError, Link
from trainer_kit.launch.membership import Membership, Readiness, Right
from trainer_kit.launch.news import BEGINS, GONE, OUTCOME
from trainer_kit.launch.other_stores import OtherStores, better_store
from trainer_kit.launch.published import BEGUN, ENDED, End, Facts, Here, Published
from trainer_kit.launch.rendezvous import Waiting
from trainer_kit.launch.served_store import ServedStore
from trainer_kit.launch.store import answers, own_candidate, serve_free_port
from trainer_kit.utils.membership_claim import read_claim
from trainer_kit.utils.units import join_names

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS, _SERVE_SECONDS = 0.2, 1.0  # for other candidates; before this machine serves a store in their place
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
        store_number: Number of stores that this machine has met the others at.
        readiness: What the ranks do.
        stays: Whether the ranks wait for the next membership in their processes.
        can_prepare: Whether the ranks can prepare to join a run under way, where this machine comes as a newcomer.
    """

    is_lasting = True

    def __init__(
        self, config: LaunchConfig, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        self._config = config
        self._candidates, self._own = config.candidates, own_candidate(config)
        self._others = OtherStores(config, self._own)
        self._say = say
        self._is_stopped = is_stopped
        self._until = Waiting(config.meeting_seconds, say, is_stopped, by_command).until
        self._outside = Waiting(math.inf, say, is_stopped, by_command).until
        self._together = Waiting(_MEETING_SECONDS, say, is_stopped, by_command).until
        self._id = uuid.uuid4().hex
        self._rank_servers: deque[TCPStore] = deque(maxlen=2)  # ranks of the last membership may still be leaving
        self._served: ServedStore | None = None
        self._link: Link | None = None
        self._past: tuple[Membership, ...] = ()
        self._published = Published()
        self._unsaid: list[str] = []
        self._has_claimed = self._is_outvoted = self._hands_over = self._has_begun = False
        self.can_prepare = self.stays = False
        self.readiness = Readiness.NOT_STARTED
        self._end = End.OVER
        self._better: int | None = None  # place of the candidate to wait at
        self._next_look = 0.0
        self.starts = self.store_number = 0
        self.membership = ""

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of the launchers."""
        return True

    @property
    def serves(self) -> bool:
        """Whether this machine serves the store."""
        return self._served is not None

    def answers(self) -> bool:
        """Return whether the store answers."""
        return self._link is not None and (self.serves or self._link.is_alive())

    def alive(self) -> int:
        """Return the number of machines that train together, without those that are gone if this one can tell."""
        return self._served.keeper.alive() if self._served is not None else self._config.num_nodes

    def waiting(self) -> int:
        """Return the number of machines that wait for a place in the run.

        Raises:
            RuntimeError: If the connection to the store is broken.
        """
        return 0 if self._link is None else self._link.here().total

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
                if self.serves and len(self._candidates) == 1:
                    raise
                self.leave_store()
        address = self._candidates[self._own] if self._own is not None and self.serves else link.address
        info = RendezvousStoreInfo(address, published.port)
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
        return self._served is None or self._served.keeper.can_go_on_without(self._id, self._has_claimed)

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
        facts = self._past, self._has_claimed, self._own is not None, end, self.readiness, self.stays
        return Facts(self._id, socket.gethostname(), *facts)

    # Coming to a run that is under way

    def running(self) -> Published | None:
        """Return the membership that runs without this machine; None without one, or if this machine has its place.

        Raises:
            RuntimeError: If the connection to the store is broken, or this machine should wait at another one.
            OSError, CutOffError, RendezvousGracefulExitError: See `next_rendezvous`.
        """
        link, last = self._linked(), self._past[-1].number if self._past else 0
        now = (published := self._newest(link)).membership
        return None if now.number <= last or self._id in now.machines else published

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

    def _linked(self) -> Link:
        if self._link is None:
            self._wait_for(self._has_store)
        assert self._link is not None
        return self._link

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait for a store to answer."""
        first, *others = self._candidates
        whom = f"one of the machines {', '.join(self._candidates)}" if others else f"the first machine at {first}"
        try:
            self._until(is_there, f"{whom} at port {self._config.port}" if others else f"{whom}:{self._config.port}")
        except TimeoutError as error:
            if not self._past or not (others or self._is_outvoted):
                raise
            self._end = End.GIVEN_UP
            last = self._past[-1]
            here = Here(1, (socket.gethostname(),), len(last.machines), last.machines[0] == self._id)
            where = _TAKEN if self._is_outvoted else here.describe(socket.gethostname())
            raise CutOffError(f"{where}: {STILL_TRAINING}") from error

    def _has_store(self) -> bool:
        """Connect to the first candidate that answers, or serve the store where that is this machine's turn."""
        if self._is_outvoted:
            return self._has_better() and self._better is not None and self._connect(self._candidates[self._better])
        order, is_new = list(range(len(self._candidates))), not self._past
        # A new run begins at the first candidate alone, and only if no other one serves a store.
        order.sort(key=lambda place: (place != self._better, place == self._own and is_new, place))
        there = self._others.published(None if is_new else _SERVE_SECONDS) if len(self._candidates) > 1 else {0: 0}
        for place in order:
            if place == self._own:
                if place == 0 or not is_new:
                    self._serve()
                    return True
            elif (place == self._better or place in there) and self._connect(self._candidates[place]):
                return True
        return False

    def _connect(self, address: str) -> bool:
        if not answers(address, self._config.port):
            return False
        try:
            self._link = Link(address, self._config.port, self._config.run_id, self._config.sign_seconds)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and len(self._candidates) == 1:
                raise
            return False
        self.store_number += 1
        return True

    def _serve(self) -> None:
        assert self._own is not None
        if self._served is None:
            self._served = ServedStore(self._config, self._candidates[self._own], self._serve_ranks)
        self._link = self._served.link()
        self.store_number += 1

    def _serve_ranks(self) -> int:
        """Serve an empty store for the ranks of a new membership, since theirs hold the addresses of their processes.

        Returns:
            Its port.
        """
        self._rank_servers.append(serve_free_port())
        return self._rank_servers[-1].port

    def leave_store(self) -> None:
        """Leave the store, and end it if this machine serves it."""
        if self._link is not None:
            self._link.stop()
            self._link = None
        if self._served is not None:
            self._served.abandon()
            self._served = None

    def _has_better(self) -> bool:
        """Look for another candidate's store that this machine should wait at."""
        formed = 0 if self._link is None else self._link.published().membership.number
        last = self._past[-1].number if self._past else 0
        here = None
        if self._link is not None:
            here = self._own if self.serves else self._candidates.index(self._link.address)
        place = better_store(self._others.published(_ANSWER_SECONDS), here, formed, last)
        self._better = self._better if place is None else place
        return place is not None

    # The meeting

    def _meet(self, link: Link) -> Published:
        """Wait for the next membership of this machine."""
        host, last = socket.gethostname(), self._past[-1].number if self._past else 0
        try:
            self._until(
                lambda: self._newest(link).membership.number > last, lambda: link.here().missing(host, self._config)
            )
        except TimeoutError as error:
            if (here := link.here()).may_follow:
                self._end = End.TIMED_OUT
                raise
            self._end = End.GIVEN_UP
            raise CutOffError(f"{here.describe(host)}: {STILL_TRAINING}") from error
        self._wait_for_place(link)
        return self._newest(link)

    def _wait_for_place(self, link: Link) -> None:
        whom, seen = "a place in the run, which has its machines", Chance.LATER

        def is_settled() -> bool:
            nonlocal seen
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

    def _newest(self, link: Link) -> Published:
        self._check(link)
        return link.published()

    def _enter(self, published: Published) -> None:
        """Belong to a membership, which counts from `confirm` on."""
        self._unsaid += published.describe(self._config)
        self._published, self._past = published, (*published.bases, published.membership)
        self._is_outvoted, self._hands_over, self._better = False, False, None
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
            if looks_elsewhere and len(self._candidates) > 1 and self._has_better():
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
        if self._link is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                if self.answers():
                    self._link.announce(self._facts(self._end))
            self._link.stop()
            self._link = None
        if self._served is not None and self._hands_over:
            self._served.hand_over(self._id, self._is_stopped, self._end)
        elif self._served is not None:
            self._served.stop(self._is_stopped, self._end)
        self._served = None
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

"""Rendezvous of launchers in order of arrival, of which some may be lost and others come later."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.keeper import (
    ENDED,
    HERE,
    MACHINES,
    MEMBERSHIP,
    PRESENCE,
    Keeper,
    Published,
    beat_key,
    machine_key,
)
from trainer_kit.launch.presence import Presence, be_present
from trainer_kit.launch.rendezvous import Waiting
from trainer_kit.launch.store import answers, connect_store, keeps_store, serve_store
from trainer_kit.utils.units import format_duration

_LOOK_SECONDS = 1.0
_MEETING_SECONDS = 30.0  # for the machines of a new membership to exchange their first words


class Link:
    """A machine's connection to the store, with its signs of life.

    Args:
        address: Address of the store.
        port: Port of the store.
        run_id: Name of the run.
        interval: Seconds between two signs of life.
        serves: Whether this machine serves the store, so that it arrives first.

    Attributes:
        store: Client of the store.
        number: Number of this machine, in order of arrival.
        tcp_store: The same client, without the prefix of the run.
    """

    def __init__(self, address: str, port: int, run_id: str, interval: float, serves: bool) -> None:
        self.tcp_store: TCPStore = connect_store(address, port)
        self.store: Store = PrefixStore(run_id, self.tcp_store)
        presence = 0 if serves else int(self.store.get(PRESENCE))  # set when the first machine has its number
        self.number: int = self.store.add(MACHINES, 1) - 1
        self._beats = PrefixStore(run_id, connect_store(address, port))  # the other client may be busy
        self._interval = interval
        self._done = threading.Event()
        self._beats.add(beat_key(self.number), 1)
        self._presence = None if serves else be_present(address, presence, self.number)
        self._thread = threading.Thread(target=self._beat, name="trainer_kit signs of life", daemon=True)
        self._thread.start()

    def announce(self, last: Published, place: int, has_left: bool = False) -> None:
        """Write what the keeper needs to know of this machine.

        Args:
            last: Its last membership.
            place: Its place in that membership.
            has_left: Whether it has left the run.
        """
        facts = [socket.gethostname(), last.number, place, last.run, has_left]
        self.store.set(machine_key(self.number), json.dumps(facts))

    def is_alive(self) -> bool:
        """Return whether this machine can give signs of life."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Give no more signs of life."""
        self._done.set()
        if self._presence is not None:
            self._presence.close()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._done.wait(self._interval):
                self._beats.add(beat_key(self.number), 1)


class ElasticRendezvous(RendezvousHandler):
    """Rendezvous in order of arrival, for `min_nodes` to `num_nodes` machines.

    The machine that serves the store decides who trains together (see `Keeper`). Machines that stay keep their order,
    so that the main process stays where it is; those that join come last. A machine that is too many waits until it is
    needed.

    Unlike torch's dynamic rendezvous, it compares no clocks of different machines, which may be seconds apart, and
    takes a machine that comes again with the same address and process ID for a new one.

    Args:
        config: Launch configuration.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the config comes from command-line options.

    Attributes:
        starts: Number of earlier memberships.
        membership: ID of the run and number of the membership, such as "5f0c/3".
        is_lasting: Whether the store outlives a restart of the ranks.
    """

    is_lasting = True

    def __init__(
        self, config: LaunchConfig, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        self._config = config
        self._say = say
        self._is_stopped = is_stopped
        self._until = Waiting(config.meeting_seconds, say, is_stopped, by_command).until
        self._outside = Waiting(math.inf, say, is_stopped, by_command).until
        self._server: TCPStore | None = None
        self._keeper: Keeper | None = None
        self._presence: Presence | None = None
        self._link: Link | None = None
        self._last, self._place = Published(), -1
        self._next_look = 0.0
        self.starts = 0
        self.membership = ""

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of the launchers."""
        return True

    def alive(self) -> int:
        """Return the number of machines that train together, without those that are gone if this one can tell."""
        return self._keeper.alive() if self._keeper is not None else self._config.num_nodes

    def waiting(self) -> int:
        """Return the number of machines that wait for a place in the run.

        Raises:
            RuntimeError: If the connection to the store is broken.
        """
        return 0 if self._link is None else int(self._link.store.get(HERE))

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines.

        Returns:
            The store, this machine's place and the number of machines.

        Raises:
            OSError: If too few machines come, or a port or address cannot be used; the message says which.
            RendezvousGracefulExitError: If the run ends without this machine.
        """
        while True:
            try:
                link = self._linked()
                link.announce(self._last, self._place)
                membership = self._meet(link)
            except RuntimeError:  # the connection to the store broke
                if self._keeper is not None:
                    raise
                self._unlink()
            else:
                break
        self._report(membership)
        self._last, self._place = membership, membership.machines.index(link.number)
        self.starts = membership.number - 1
        self.membership = f"{membership.run}/{membership.number}"
        store = PrefixStore(str(membership.number), link.store)
        store.set_timeout(timedelta(seconds=_MEETING_SECONDS))
        info = RendezvousStoreInfo(self._config.master_addr, link.tcp_store.port)
        return RendezvousInfo(store, self._place, len(membership.machines), info)

    def _linked(self) -> Link:
        if self._link is None:
            config = self._config
            if keeps_store(config) and self._server is None:
                self._server = serve_store(config)
                own = PrefixStore(config.run_id, connect_store("127.0.0.1", self._server.port))
                numbers = config.min_nodes or config.num_nodes, config.num_nodes
                seconds = config.last_call_seconds, config.silence_seconds
                self._presence = Presence()
                self._keeper = Keeper(own, *numbers, *seconds, ended=self._presence.ended)
                self._keeper.start()
            address, port = ("127.0.0.1", self._server.port) if self._server else (config.master_addr, config.port)
            self._until(lambda: answers(address, port), f"the first machine at {address}:{port}")
            self._link = Link(address, port, config.run_id, config.sign_seconds, self._presence is not None)
            if self._presence is not None:
                self._link.store.set(PRESENCE, str(self._presence.port))
        return self._link

    def _unlink(self) -> None:
        if self._link is not None:
            self._link.stop()
            self._link = None

    def _meet(self, link: Link) -> Published:
        """Wait for the next membership of this machine."""

        def has_news() -> bool:
            self._check(link)
            return Published.from_json(link.store.get(MEMBERSHIP)).number > self._last.number

        def is_member() -> bool:
            self._check(link)
            return link.number in Published.from_json(link.store.get(MEMBERSHIP)).machines

        def who() -> str:
            here, least = int(link.store.get(HERE)), self._config.min_nodes or self._config.num_nodes
            return f"a machine ({here} of {'at least ' if self._config.min_nodes else ''}{least} came)"

        self._until(has_news, who)
        self._outside(is_member, "a place in the run, which has its machines")
        return Published.from_json(link.store.get(MEMBERSHIP))

    def _check(self, link: Link) -> None:
        """Raise an error if the run has ended or the store is gone."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            if not link.is_alive() or not answers(*self._address()):
                raise RuntimeError("the store does not answer")
        if link.store.check([ENDED]):
            raise RendezvousGracefulExitError("the run has ended")

    def _address(self) -> tuple[str, int]:
        if self._server is not None:
            return "127.0.0.1", self._server.port
        return self._config.master_addr, self._config.port

    def _report(self, membership: Published) -> None:
        """Say who is there, where the number of machines may change."""
        config, count = self._config, len(membership.machines)
        if config.min_nodes is None:
            return
        of = f"{count} of {config.num_nodes} machines"
        if self._last.number == 0 and not membership.joined:
            limit = format_duration(config.meeting_seconds)
            self._say(
                f"{of}, {config.min_nodes} are enough; if the one at {config.master_addr} is lost, which serves the "
                f"store, the others wait up to {limit} for it"
            )
            return
        parts = [
            f"{', '.join(hosts)} {(one if len(hosts) == 1 else several)}"
            for hosts, one, several in (
                (membership.gone, "is gone", "are gone"), (membership.joined, "has joined", "have joined")
            )
            if hosts
        ]  # fmt: skip
        if parts:
            self._say(f"{' and '.join(parts)}: {of} go on")

    def shutdown(self) -> bool:
        """Leave the run."""
        if self._link is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                if answers(*self._address()):
                    self._link.announce(self._last, self._place, has_left=True)
            self._unlink()
        if self._keeper is not None:
            self._keeper.stop(self._is_stopped)
            self._keeper = None
        if self._presence is not None:
            self._presence.close()
            self._presence = None
        self._server = None
        return True

    def get_backend(self) -> str:
        """Return "c10d"."""
        return "c10d"

    def is_closed(self) -> bool:
        """Return False: `next_rendezvous` tells when the run has ended."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the run ends when its machines have left."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the agent asks `Machines` about machines that join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._config.run_id

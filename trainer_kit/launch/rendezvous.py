"""Rendezvous of launchers whose machines have fixed numbers, and the wait for a machine that is missing."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import uuid
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.store import LimitedStore, answers, connect_store, serve_store
from trainer_kit.utils.units import format_duration

_PATIENCE_SECONDS = 5.0  # until the user sees which machine is missing


class StaticRendezvous(StaticTCPRendezvous):
    """Rendezvous of machines with fixed numbers.

    Unlike torch's, it creates a new store for each start of the ranks, since the old one holds stale addresses. It
    reports which machine is missing, and takes a free port where none was chosen.

    Args:
        config: Launch configuration with the number of this machine.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the config comes from command-line options.

    Attributes:
        starts: Number of earlier starts that the rendezvous knows of: 0.
        membership: Name of the membership; empty.
        is_lasting: Whether the store outlives a restart of the ranks.
        store_number: Number of stores that outlive a restart: 0.
        stays: Whether the ranks wait for the next meeting in their processes.
    """

    starts = store_number = 0
    membership = ""
    is_lasting = stays = False

    def __init__(
        self, config: LaunchConfig, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        address, seconds = config.master_addr, int(config.meeting_seconds) + 1
        super().__init__(address, config.port, config.node_rank, config.num_nodes, config.run_id, seconds)
        self._config = config
        self._waiting = Waiting(config.meeting_seconds, say, is_stopped, by_command)
        self._number = "--node-rank " if by_command else "node_rank="
        self._start = b""

    @property
    def serves(self) -> bool:
        """Whether this machine serves the store."""
        return bool(self.rank == 0)

    def answers(self) -> bool:
        """Return whether the store answers."""
        return self.serves or answers(self.master_addr, self.master_port)

    def can_leave(self) -> bool:
        """Return False: the machines are fixed."""
        return False

    def expect_to_leave(self) -> None:
        """Do nothing: the machines are fixed."""

    def confirm(self) -> None:
        """Do nothing: all machines are in each membership."""

    def report(self) -> None:
        """Do nothing: the machines are fixed."""

    def is_outvoted(self) -> bool:
        """Return False: the machines are fixed."""
        return False

    def leave(self, error: BaseException | None) -> None:
        """Leave the run; the other machines hear of its end from the agents."""
        self.shutdown()

    def alive(self) -> int:
        """Return the number of machines that give signs of life: all, since none are exchanged."""
        return int(self.world_size)

    def waiting(self) -> int:
        """Return 0: all machines are there from the beginning."""
        return 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines.

        Returns:
            The store, this machine's number and the number of machines.

        Raises:
            OSError: If a machine does not come, or a port or address cannot be used; the message says which.
            ValueError: If two machines have the same number.
        """
        self._store = None
        server = self._listen() if self.serves else self._connect()
        server.set_timeout(self.timeout)
        self._store = store = server if self.serves else LimitedStore(server)
        if store.add(f"arrived-{self.rank}", 1) > 1:
            raise ValueError(f"node_rank={self.rank} is not allowed; another machine has that number")
        try:
            for number in range(self.world_size):
                whom = f"machine {number} of {self.world_size} ({self._number}{number})"
                self._waiting.until(functools.partial(store.check, [f"arrived-{number}"]), whom)
        except RuntimeError as error:
            raise ConnectionError(f"machine 0 ({self.master_addr}) ended before all had come") from error
        info = RendezvousStoreInfo(self.master_addr, server.port)
        return RendezvousInfo(PrefixStore(self.run_id, store), self.rank, self.world_size, info)

    def _listen(self) -> TCPStore:
        store = serve_store(self._config, self.master_addr)
        store.set("start", uuid.uuid4().hex)
        return store

    def _connect(self) -> TCPStore:
        stores: list[TCPStore] = []

        def is_there() -> bool:
            if not answers(self.master_addr, self.master_port):
                return False
            with contextlib.suppress(RuntimeError):  # the previous store may still be closing
                store = connect_store(self.master_addr, self.master_port)
                if (start := store.get("start")) != self._start:
                    self._start = start
                    stores.append(store)
            return bool(stores)

        self._waiting.until(is_there, f"machine 0 at {self.master_addr}:{self.master_port} ({self._number}0)")
        return stores[0]


class Waiting:
    """Waits for other machines and reports which one is missing.

    Args:
        seconds: Longest wait; infinity for none.
        say: Shows a sentence to the user.
        is_stopped: Returns whether to stop waiting.
        by_command: Whether the user gives command-line options, not arguments of a function.
    """

    def __init__(
        self, seconds: float, say: Callable[[str], None], is_stopped: Callable[[], bool], by_command: bool
    ) -> None:
        self._seconds = seconds
        longer = 2 * max(1, int(min(seconds, 1e9)))
        self._longer = "--start-timeout" if by_command else f"rdzv_conf={{'timeout': {longer}}}"
        self._say = say
        self._is_stopped = is_stopped

    def until(self, is_there: Callable[[], bool], whom: str | Callable[[], str], pause: float = 0.1) -> None:
        """Wait until `is_there()` returns True.

        Args:
            is_there: Condition to wait for.
            whom: Name of the missing machine, for messages, or a function that returns it.
            pause: Seconds between two looks.

        Raises:
            TimeoutError: If the wait exceeds its limit.
            InterruptedError: If `is_stopped()` returns True.
        """
        start, is_told = time.monotonic(), False
        name = whom if callable(whom) else lambda: whom
        while not is_there():
            waited = time.monotonic() - start
            if self._is_stopped():
                raise InterruptedError(f"a signal came while waiting for {name()}")
            if waited > self._seconds:
                raise TimeoutError(
                    f"{name()} did not answer within {format_duration(self._seconds)}; start it, check master_addr, "
                    f"master_port and the firewall, or wait longer with {self._longer}"
                )
            if waited > _PATIENCE_SECONDS and not is_told:
                limit = f", up to {format_duration(self._seconds)}" if math.isfinite(self._seconds) else ""
                self._say(f"waiting for {name()}{limit}")
                is_told = True
            time.sleep(pause)

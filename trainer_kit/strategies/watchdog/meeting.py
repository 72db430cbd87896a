"""`Meeting`: an agreement that all processes are at the same call, before any begins a collective there."""

from __future__ import annotations

import time

from torch.distributed.distributed_c10d import Store

from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat

_LOOK_SECONDS, _LONG_LOOK_SECONDS = 0.001, 0.05


class Meeting:
    """A place in the store where processes wait for one another, which a process can leave without harm.

    A process that waits in a collective cannot be stopped, and backends end the program where two processes are in
    different ones. A meeting comes before a collective that some processes may have begun alone.

    Args:
        store: A client of the main thread.
        heartbeat: Monitor of the other processes.
    """

    def __init__(self, store: Store, heartbeat: Heartbeat) -> None:
        self._store, self._heartbeat = store, heartbeat
        self._keys = [f"at/{rank}" for rank in range(heartbeat.world_size)]
        self._at = (0, 0)  # the round, and the number of meetings in it
        for key in self._keys:
            store.compare_set(key, "", "")  # reading a missing key would block

    def join(self, what: str, remedy: str) -> None:
        """Wait until all processes have joined their meeting with the same number.

        Args:
            what: What this process is about to do, for the error.
            remedy: What to do instead.

        Raises:
            LostProcessError: If a process that has not joined has failed, or does not answer.
            ValueError: If all processes that have not joined wait elsewhere for this one, or have left the run.
        """
        if others := self.find_absent():
            raise ValueError(f"rank {self._heartbeat.rank} {what}, but {'; '.join(others)}; {remedy}")

    def find_absent(self) -> list[str]:
        """Join the meeting as `join` does; return where the processes are that do not come.

        If none does, this process leaves the meeting, as if it had not come.

        Raises:
            LostProcessError: See `join`.
        """
        heartbeat, begun = self._heartbeat, time.monotonic()
        before, heartbeat.urgent = heartbeat.urgent, True
        self._move(1)
        try:
            while absent := self._absent():
                waited = time.monotonic() - begun
                problems = [each for each in heartbeat.peers.problems() if each.rank in absent]
                if missing := [each.text for each in problems if each.kind != "left"]:
                    raise LostProcessError(heartbeat.explain(RuntimeError("; ".join(missing))))
                left = {each.rank: each.text for each in problems}
                waiting = [rank for rank in absent if rank not in left]
                # By then, all beats are from after this process joined.
                is_over = waited > heartbeat.patience and heartbeat.peers.all_wait(waiting, heartbeat.patience)
                if is_over or not waiting:
                    if len(absent) == len(self._keys) - 1:
                        self._move(-1)
                    return [left.get(rank) or heartbeat.peers.account(rank) for rank in absent]
                time.sleep(_LOOK_SECONDS if waited < 1 else _LONG_LOOK_SECONDS)
        finally:
            heartbeat.urgent = before
        return []

    def _move(self, meetings: int) -> None:
        """Publish that this process has joined another meeting, or has left it."""
        current = self._heartbeat.round
        self._at = (current, (self._at[1] if self._at[0] == current else 0) + meetings)
        self._store.set(self._keys[self._heartbeat.rank], "{} {}".format(*self._at))

    def _absent(self) -> list[int]:
        """Return the ranks that have not joined this meeting; those in a later one have."""
        places = [tuple(map(int, each.split())) for each in self._store.multi_get(self._keys)]
        return [rank for rank, place in enumerate(places) if place < self._at]

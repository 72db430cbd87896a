"""`ServedStore`: the store that launchers meet at, on the machine that serves it, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.keeper import Keeper
from trainer_kit.launch.link import Link
from trainer_kit.launch.presence import Presence
from trainer_kit.launch.published import PRESENCE, End
from trainer_kit.launch.store import connect_store, serve_store


class ServedStore:
    """The store of a run with its `Keeper` and its `Presence`.

    Args:
        config: Launch configuration.
        address: Address by which the other machines reach this one.
        serve_ranks: See `Keeper`.

    Attributes:
        keeper: Decides which machines train together.

    Raises:
        OSError: If the port is in use, or the address leads elsewhere.
    """

    def __init__(self, config: LaunchConfig, address: str, serve_ranks: Callable[[], int]) -> None:
        self._config = config
        self._server = serve_store(config, address)
        own = PrefixStore(config.run_id, connect_store("127.0.0.1", self._server.port))
        numbers = config.min_nodes or config.num_nodes, config.num_nodes
        seconds = config.last_call_seconds, config.silence_seconds
        self._presence = Presence()
        is_only = len(config.candidates) == 1
        ended = self._presence.ended
        self.keeper = Keeper(own, *numbers, *seconds, serve_ranks, ended=ended, is_only_store=is_only)
        self.keeper.start()

    def link(self) -> Link:
        """Return this machine's own connection."""
        config = self._config
        link = Link("127.0.0.1", self._server.port, config.run_id, config.sign_seconds, serves=True)
        link.store.set(PRESENCE, str(self._presence.port))
        return link

    def abandon(self) -> None:
        """End the store, without a word to the machines."""
        self.keeper.halt()
        self._presence.close()

    def stop(self, is_hurried: Callable[[], bool], end: End) -> None:
        """End the run and the store; see `Keeper.stop`."""
        self.keeper.stop(is_hurried, end)
        self._presence.close()

    def hand_over(self, own: str, is_hurried: Callable[[], bool], end: End) -> None:
        """End the store, but not the run; see `Keeper.hand_over`."""
        self.keeper.hand_over(own, is_hurried, end)
        self._presence.close()

"""`OtherStores`: asks the other candidates for the store which memberships they know, and which one is better."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping
from concurrent.futures import Future

from torch._C._distributed_c10d import PrefixStore

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.published import MEMBERSHIP, Published
from trainer_kit.launch.store import answers, connect_store
from trainer_kit.utils.background import in_background

_PEEK_SECONDS = 2.0
_FRESH_SECONDS = 5.0


class OtherStores:
    """The stores of the other candidates.

    They are asked at the same time and in the background, since a candidate that is cut off takes seconds.

    Args:
        config: Launch configuration.
        own: Place of this machine among the candidates; None if it is no candidate.
    """

    def __init__(self, config: LaunchConfig, own: int | None) -> None:
        self._addresses = {place: address for place, address in enumerate(config.candidates) if place != own}
        self._port, self._run_id = config.port, config.run_id
        self._asked: dict[int, tuple[float, Future[int | None]]] = {}

    def published(self, patience: float | None) -> dict[int, int]:
        """Return the numbers of the memberships in the stores that answer, by place.

        Args:
            patience: Seconds to wait for answers; None: as long as it takes. Those that come later are in the result of
                the next call, if that comes soon.
        """
        now, found = time.monotonic(), dict[int, int]()
        for place, (begun, question) in list(self._asked.items()):
            if question.done() and now - begun > _FRESH_SECONDS:
                del self._asked[place]
        for place in self._addresses.keys() - self._asked.keys():
            self._asked[place] = now, self._ask(self._addresses[place])
        concurrent.futures.wait([question for _, question in self._asked.values()], timeout=patience)
        for place, (_, question) in list(self._asked.items()):
            if question.done():
                del self._asked[place]
                if (number := question.result()) is not None:
                    found[place] = number
        return found

    def _ask(self, address: str) -> Future[int | None]:
        return in_background(lambda: _published_at(address, self._port, self._run_id), "trainer_kit other stores")


def better_store(there: Mapping[int, int], here: int | None, formed: int, last: int) -> int | None:
    """Return the place of another store that a machine should wait at; None if there is none.

    That is the first store with a newer membership. Without one, all machines wait for the next membership at the first
    store that answers, unless its membership is older than that of this machine's store: its machines come to this one.

    Args:
        there: Numbers of the memberships in the stores of the other candidates, by place.
        here: Place of the store that the machine waits at; None without one.
        formed: Number of the membership in that store; 0 before the first.
        last: Number of the machine's last membership; 0 before the first.
    """
    others = {place: number for place, number in sorted(there.items()) if place != here}
    better = [place for place, number in others.items() if number > max(formed, last)]
    if not better and here is not None and formed <= last:  # it waits for the next membership
        better = [place for place, number in others.items() if place < here and not 0 < number < formed]
    return better[0] if better else None


def _published_at(address: str, port: int, run_id: str) -> int | None:
    """Return the number of the membership in the store of a candidate; None if it serves no store."""
    if not answers(address, port):
        return None
    try:
        store = PrefixStore(run_id, connect_store(address, port, _PEEK_SECONDS))
        if not store.check([MEMBERSHIP]):
            return None
        return Published.from_json(store.get(MEMBERSHIP)).membership.number
    except (RuntimeError, TimeoutError, ValueError):  # it is just ending, or another program
        return None

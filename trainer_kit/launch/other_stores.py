"""`OtherStores`: asks the other candidates for the store which memberships they know."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from torch._C._distributed_c10d import PrefixStore

from trainer_kit.launch.keeper import MEMBERSHIP, Published
from trainer_kit.launch.store import answers, connect_store

_PEEK_SECONDS = 2.0


class OtherStores:
    """The stores of the other candidates.

    They are asked at the same time and in the background, since a candidate that is cut off takes seconds.

    Args:
        addresses: Addresses of the other candidates, by place.
        port: Port of the store.
        run_id: Name of the run.
    """

    def __init__(self, addresses: Mapping[int, str], port: int, run_id: str) -> None:
        self._addresses, self._port, self._run_id = addresses, port, run_id
        self._asked: dict[int, Future[int | None]] = {}

    def published(self, patience: float | None) -> dict[int, int]:
        """Return the numbers of the memberships in the stores that answer, by place.

        Args:
            patience: Seconds to wait for answers; None: as long as it takes. A later answer is in the next call's.
        """
        for place, address in self._addresses.items():
            if place not in self._asked:
                self._asked[place] = self._ask(address)
        concurrent.futures.wait(self._asked.values(), timeout=patience)
        answered = {place: question.result() for place, question in self._asked.items() if question.done()}
        for place in answered:
            del self._asked[place]
        return {place: number for place, number in answered.items() if number is not None}

    def _ask(self, address: str) -> Future[int | None]:
        question: Future[int | None] = Future()

        def ask() -> None:
            try:
                question.set_result(_published_at(address, self._port, self._run_id))
            except BaseException as error:
                question.set_exception(error)
                raise

        threading.Thread(target=ask, name="trainer_kit other stores", daemon=True).start()
        return question


def _published_at(address: str, port: int, run_id: str) -> int | None:
    """Return the number of the membership in the store of a candidate; None if it serves no store."""
    if not answers(address, port):
        return None
    try:
        store = PrefixStore(run_id, connect_store(address, port, _PEEK_SECONDS))
        if not store.check([MEMBERSHIP]):
            return None
        return Published.from_json(store.get(MEMBERSHIP)).membership.number
    except (RuntimeError, TimeoutError):  # it is just ending, or another program
        return None

"""`Mailbox`: short messages between the processes of a run, outside of collectives."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

_LOOK_SECONDS = 0.5


class Message:
    """A message that is to be sent, or that a thread waits for.

    Attributes:
        key: Name of the message in the store.
        rank: Rank of the sender.
        text: The message; None while it is not known, and if it will never come.
        is_done: Set when the message is sent, is there or will never come.
    """

    def __init__(self, key: str, rank: int, text: str | None = None) -> None:
        self.key, self.rank, self.text = key, rank, text
        self.is_done = threading.Event()


class Mailbox:
    """Messages of this process to others and back, through a store that one thread talks to.

    Any thread may send and receive; the thread that talks to the store calls `serve`.

    Args:
        wake: Wakes the thread that talks to the store.
        is_lost: Returns whether the store does not answer any more.
    """

    def __init__(self, wake: Callable[[], object], is_lost: Callable[[], bool]) -> None:
        self._wake, self._is_lost = wake, is_lost
        self._outgoing: collections.deque[Message] = collections.deque()
        self._awaited: list[Message] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for a message."""
        return bool(self._awaited)

    def send(self, message: Message) -> bool:
        """Send a message, and wait until the store has it; return False if the store does not answer any more."""
        self._outgoing.append(message)
        return self._wait(message)

    def receive(self, key: str, rank: int) -> str | None:
        """Wait for a message of another process; return None if that process is missing, or the store is."""
        message = Message(key, rank)
        self._awaited.append(message)
        if not self._wait(message):
            with contextlib.suppress(ValueError):  # it has come in the meantime
                self._awaited.remove(message)
        return message.text

    def serve(self, store: Store, is_missing: Callable[[int], bool]) -> None:
        """Write the messages to send, and read those that threads wait for.

        Args:
            store: The store.
            is_missing: Returns whether a process will not send anything any more, by its rank.
        """
        while self._outgoing:
            message = self._outgoing[0]
            assert message.text is not None
            store.set(message.key, message.text)
            self._outgoing.popleft()
            message.is_done.set()
        for message in [*self._awaited]:
            is_last_look = is_missing(message.rank)  # first: what a process sends, it sends before it leaves
            if store.check([message.key]):
                message.text = store.get(message.key).decode()
                store.delete_key(message.key)
            elif not is_last_look:
                continue
            self._awaited.remove(message)
            message.is_done.set()

    def _wait(self, message: Message) -> bool:
        self._wake()
        while not message.is_done.wait(_LOOK_SECONDS):
            if self._is_lost():
                return False
        return True

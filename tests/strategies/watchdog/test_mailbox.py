"""Messages between processes through a store that one thread talks to."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from trainer_kit.strategies.watchdog.mailbox import Mailbox, Message

pytestmark = pytest.mark.timeout(60)


class Post:
    """A store, and the mailbox of a process, which is woken when it has something to do."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.wishes: queue.Queue[None] = queue.Queue()
        self.is_lost = threading.Event()
        self.mail = Mailbox(lambda: self.wishes.put(None), self.is_lost.is_set)

    def serve(self, *missing: int) -> None:
        self.mail.serve(self.store, lambda rank: rank in missing)


@pytest.fixture
def post() -> Post:
    return Post()


def test_a_message_comes_where_it_is_awaited_and_leaves_nothing(post: Post) -> None:
    with ThreadPoolExecutor(2) as threads:
        received = threads.submit(post.mail.receive, "key", 1)
        post.wishes.get()
        assert post.mail.is_waiting
        post.serve()
        assert not received.done()
        sent = threads.submit(post.mail.send, Message("key", 1, "text"))
        post.wishes.get()
        post.serve()
        assert (sent.result(), received.result()) == (True, "text")
    assert not post.mail.is_waiting
    assert not post.store.check(["key"])


def test_what_a_process_sent_before_it_left_is_received(post: Post) -> None:
    post.store.set("key", "text")
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(post.mail.receive, "key", 1)
        post.wishes.get()
        post.serve(1)
        assert received.result() == "text"


def test_a_missing_process_sends_nothing(post: Post) -> None:
    with ThreadPoolExecutor(2) as threads:
        one, two = (threads.submit(post.mail.receive, f"key {rank}", rank) for rank in (1, 2))
        for _ in range(2):
            post.wishes.get()
        post.serve(1)
        assert one.result() is None
        assert not two.done()
        post.serve(1, 2)
        assert two.result() is None


def test_nothing_is_awaited_of_a_store_that_is_lost(post: Post) -> None:
    post.is_lost.set()
    assert post.mail.receive("key", 1) is None
    assert not post.mail.send(Message("key", 0, "text"))


def test_a_message_that_the_store_refuses_is_sent_later(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(post.mail.send, Message("key", 0, "text"))
        post.wishes.get()
        with monkeypatch.context() as patch:
            patch.setattr(post, "store", None)
            with pytest.raises(AttributeError):
                post.serve()
        assert not sent.done()
        post.serve()
        assert sent.result()
    assert post.store.get("key") == b"text"

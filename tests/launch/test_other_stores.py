"""A machine asks the other candidates for the store which memberships they know."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from kit.clock import Clock
from kit.ranks import free_port
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer_kit.launch import other_stores
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.membership import Membership
from trainer_kit.launch.other_stores import OtherStores, better_store
from trainer_kit.launch.published import MEMBERSHIP, Published
from trainer_kit.launch.store import serve_store

NOWHERE = "192.0.2.1"  # an address for documentation, which no machine has


@pytest.fixture
def store() -> TCPStore:
    return serve_store(LaunchConfig(), "127.0.0.1")


def others(*addresses: str, port: int = 1, run_id: str = "run", own: int | None = None) -> OtherStores:
    config = LaunchConfig(
        master_addr=",".join(addresses), master_port=port, rdzv_id=run_id, num_nodes=4, min_nodes=1, cpu=True
    )
    return OtherStores(config, own)


def test_the_memberships_of_other_candidates(store: TCPStore) -> None:
    assert others("127.0.0.1", port=store.port).published(None) == {}, "no keeper"
    PrefixStore("run", store).set(MEMBERSHIP, Published(Membership(7, ("id",), "run", ("host",))).to_json())
    addresses = "127.0.0.1", "127.0.0.3", "127.0.0.2", NOWHERE
    assert others(*addresses, port=store.port, own=1).published(None) == {0: 7, 2: 7}
    assert others("127.0.0.1", port=store.port, run_id="another").published(None) == {}
    assert others("127.0.0.1", port=free_port()).published(None) == {}
    assert others("127.0.0.1", own=0).published(None) == {}


def test_a_silent_candidate_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once until it answers, which a later call returns."""
    answer, asked = threading.Event(), list[str]()

    def ask(address: str, port: int, run_id: str) -> int:
        asked.append(address)
        if address == NOWHERE:
            assert answer.wait(60)
        return 8

    monkeypatch.setattr(other_stores, "_published_at", ask)
    silent = others("127.0.0.2", NOWHERE, "127.0.0.1", own=0)
    assert silent.published(0.2) == {2: 8}
    assert silent.published(0.2) == {2: 8}
    assert sorted(asked) == ["127.0.0.1", "127.0.0.1", NOWHERE]
    answer.set()
    end = time.monotonic() + 60
    while silent.published(0.2) != {1: 8, 2: 8}:
        assert time.monotonic() < end


def test_an_answer_of_long_ago_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may have ended since."""
    clock, number, answered = Clock(), 7, threading.Event()

    def ask(address: str, port: int, run_id: str) -> int:
        answered.wait(60)
        return number

    monkeypatch.setattr(other_stores, "_published_at", ask)
    candidate = others("127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(other_stores, "time", SimpleNamespace(monotonic=clock.monotonic))
        assert candidate.published(0.0) == {}
        answered.set()
        end = time.monotonic() + 60
        while not candidate._asked[0][1].done():
            assert time.monotonic() < end
        number = 8
        clock.now += 4
        assert candidate.published(60) == {0: 7}
        answered.clear()
        assert candidate.published(0.0) == {}
        answered.set()
        while not candidate._asked[0][1].done():
            assert time.monotonic() < end
        number = 9
        clock.now += 6
        assert candidate.published(60) == {0: 9}


@pytest.mark.parametrize(
    ("there", "here", "formed", "last", "better"),
    [
        ({0: 3, 2: 5, 3: 9}, 1, 4, 4, 2),
        ({0: 4}, None, 0, 4, None),
        ({0: 5}, None, 0, 4, 0),
        ({0: 0}, 1, 0, 0, 0),
        ({1: 0}, 0, 0, 4, None),
        ({0: 0}, 1, 4, 4, 0),
        ({0: 3}, 1, 0, 4, 0),
        ({0: 3}, 1, 4, 4, None),
        ({0: 0}, 1, 5, 4, None),
        ({1: 5}, 1, 4, 4, None),
        ({0: 0, 2: 9}, 1, 4, 4, 2),
    ],
    ids=[
        "newer", "not newer", "newer than the last", "both new", "the first one", "another one in its place",
        "it may be needed", "left behind", "this one has formed", "the same one",
        "newer before earlier",
    ],
)  # fmt: skip
def test_where_machines_wait(
    there: dict[int, int], here: int | None, formed: int, last: int, better: int | None
) -> None:
    """A store with an older membership is one that was cut off, or an answer of before its end."""
    assert better_store(there, here, formed, last) == better

"""The store of a run, on the machine that serves it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from kit.ranks import free_port

from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.link import Link
from trainer_kit.launch.published import ENDED, End, Facts
from trainer_kit.launch.served_store import ServedStore
from trainer_kit.launch.store import answers


@pytest.fixture
def config() -> LaunchConfig:
    return LaunchConfig(num_nodes=2, min_nodes=1, master_port=free_port(), last_call=1.0, cpu=True)


@pytest.fixture
def served(config: LaunchConfig) -> Iterator[ServedStore]:
    ports = iter([4000])
    store = ServedStore(config, "127.0.0.1", lambda: next(ports))
    yield store
    store.keeper.halt()


def members(own: Link) -> set[str]:
    """The machines of the first membership."""
    while not own.published().membership.number:
        time.sleep(0.01)
    return set(own.published().membership.machines)


def test_its_machines_meet(config: LaunchConfig, served: ServedStore) -> None:
    own = served.link()
    other = Link("127.0.0.1", config.port, config.run_id, 0.05)
    other.announce(Facts("other", "host"))
    own.announce(Facts("own", "host"))
    assert (own.number, other.number) == (0, 1)
    assert members(own) == {"own", "other"}
    assert other.published().port == 4000
    for each in (own, other):
        each.stop()
    served.abandon()


@pytest.fixture
def pair(config: LaunchConfig, served: ServedStore) -> Iterator[tuple[Link, Link]]:
    """The machine with the store and another one, which train together."""
    own, other = served.link(), Link("127.0.0.1", config.port, config.run_id, 0.05)
    for name, link in (("own", own), ("other", other)):
        link.announce(Facts(name, "host"))
    members(own)
    yield own, other
    for link in (own, other):
        link.stop()


def test_it_can_end_without_the_end_of_the_run(pair: tuple[Link, Link], served: ServedStore) -> None:
    own, other = pair
    other.announce(Facts("other", "host", (other.published().membership,)))
    served.hand_over("own", lambda: False, End.LEFT)
    assert not own.store.check([ENDED]), "the other one waits for the next membership"


def test_the_run_ends_where_all_leave(pair: tuple[Link, Link], served: ServedStore) -> None:
    """A machine that waits for a place has to hear of it."""
    own, other = pair
    for name, link in (("own", own), ("other", other)):
        link.announce(Facts(name, "host", end=End.LEFT))
    served.hand_over("own", lambda: False, End.LEFT)
    assert own.store.get(ENDED).decode() == End.LEFT


def test_its_end_is_announced(config: LaunchConfig, served: ServedStore) -> None:
    own = served.link()
    own.announce(Facts("own", "host", end=End.OVER))
    served.stop(lambda: False, End.GIVEN_UP)
    assert own.store.get(ENDED).decode() == End.GIVEN_UP
    own.stop()


def test_a_port_that_another_program_uses(config: LaunchConfig, served: ServedStore) -> None:
    assert answers("127.0.0.1", config.port)
    with pytest.raises(OSError, match=f"master_port={config.port} is in use on this machine"):
        ServedStore(config, "127.0.0.1", lambda: 0)

"""Exchanges with the processes of other machines, in a thread."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.ranks import on_ranks

from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.multinode import MultiNode
from trainer_kit.strategies.peer_channel import PeerChannel, peers_of


@given(st.integers(1, 9), st.integers(1, 4))
def test_each_rank_has_a_peer_in_its_place_half_of_the_machines_on(machines: int, processes: int) -> None:
    places = [machine for machine in range(machines) for _ in range(processes)]
    peers = peers_of(places)
    if machines == 1:
        assert peers == [None] * processes
        return
    for rank, peer in enumerate(peers):
        assert peer is not None
        assert places[peer] == (places[rank] + machines // 2) % machines
        assert peer % processes == rank % processes
    assert sorted(peer for peer in peers if peer is not None) == [*range(len(places))], "each receives from one"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_a_peer_is_on_another_machine_whatever_machines_there_are(machines: list[int]) -> None:
    peers = peers_of(machines)
    assert len(peers) == len(machines)
    for rank, peer in enumerate(peers):
        assert (peer is None) == (len({*machines}) == 1)
        assert peer is None or machines[peer] != machines[rank]


def on_machines(place: str = "") -> MultiNode:
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]})
    strategy = MultiNode(device="cpu")
    strategy.setup()
    return strategy


def exchange() -> Any:
    strategy = on_machines()
    channel = strategy.session.open_peer_channel()
    assert channel is not None
    rank, size = strategy.rank, strategy.world_size
    gathered = channel.gather({"rank": rank, "text": "x" * rank})
    source = channel.peers.index(rank)
    found = list[list[int]]()

    def both() -> None:
        for number in range(3):
            received = torch.empty(source + 1, dtype=torch.uint8)
            channel.exchange(torch.full((rank + 1,), 10 * rank + number, dtype=torch.uint8), {source: received})
            found.append(received.tolist())

    thread = threading.Thread(target=both)
    thread.start()
    for _ in range(20):  # other collectives go on meanwhile
        assert strategy.collectives.all_reduce_ints([1]) == [size]
    thread.join()
    channel.close()
    again = strategy.session.open_peer_channel()
    assert again is not None
    assert again.gather(rank) == [*range(size)]
    again.close()
    return gathered, source, found


@pytest.mark.distributed
def test_values_and_bytes_reach_their_peers() -> None:
    for gathered, source, found in on_ranks(3, exchange):
        assert gathered == [{"rank": rank, "text": "x" * rank} for rank in range(3)]
        assert found == [[10 * source + number] * (source + 1) for number in range(3)]


def break_off() -> tuple[float, list[int]]:
    strategy = on_machines()
    channel = strategy.session.open_peer_channel()
    assert channel is not None
    begin = time.monotonic()
    if strategy.rank == 1:
        time.sleep(0.2)
        channel.break_off()
    with pytest.raises(OSError, match="another process left"):
        channel.exchange(None, {1 - strategy.rank: torch.empty(1, dtype=torch.uint8)})
    seconds = time.monotonic() - begin
    channel.close()
    return seconds, [*strategy.collectives.all_reduce_ints([1])]


@pytest.mark.distributed
def test_a_process_that_breaks_off_keeps_nobody_waiting() -> None:
    for seconds, ranks in on_ranks(2, break_off):
        assert seconds < 5
        assert ranks == [2], "all other connections live"


def alone() -> PeerChannel | None:
    strategy = DDP(device="cpu")
    strategy.setup()
    return strategy.session.open_peer_channel()


@pytest.mark.distributed
def test_a_lone_process_has_no_channel() -> None:
    assert on_ranks(1, alone) == [None]

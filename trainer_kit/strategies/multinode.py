"""Several machines, each perhaps with a disk of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections import Counter

import psutil

from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.multinode_session import MultiNodeSession

logger = logging.getLogger("trainer_kit")

_ANYWHERE = "192.0.2.1"
"""An address that stands for any other machine (RFC 5737); nothing is sent to it."""


class MultiNode(DDP):
    """Trains on the processes of several machines; takes what `DDP` takes.

    Beyond that it says at the start who runs where, lets gloo use the network that leads to the machine of rank 0
    (where GLOO_SOCKET_IFNAME names none), and sends a checkpoint to the machines that do not see its folder.
    """

    spans_machines = True
    session_type = MultiNodeSession
    session: MultiNodeSession

    def setup(self) -> None:
        if (
            self.group.heartbeat is None
            and self.group.place.has_several_machines
            and "GLOO_SOCKET_IFNAME" not in os.environ
        ):
            interface = route_to(self.group.place.address)
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
        super().setup()

    def _report(self, places: list[tuple[str, str]]) -> None:
        place, machines = self.group.place, dict[int, list[int]]()
        for node, _, rank in sorted(self.collectives.gather_object((place.node, place.local_rank, place.rank))):
            machines.setdefault(node, []).append(rank)
        hosts = [host for host, _ in places]
        self.collectives.hosts, self.session.machines = hosts, machines
        if self.is_main:
            at = f"{place.address}:{place.port}"
            title = f"{self.world_size} processes on {len(machines)} machines, which meet at {at}"
            lines = [
                f"  machine {node}, {hosts[ranks[0]]}: {_described(places, ranks)}" for node, ranks in machines.items()
            ]
            logger.info("\n".join([title, *lines]))


def _described(places: list[tuple[str, str]], ranks: list[int]) -> str:
    """Like "ranks 0-7 on 8 x NVIDIA H100": a GPU's own number is left out."""
    devices = Counter(places[rank][1].rpartition(" ")[0] or places[rank][1] for rank in ranks)
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    on = ", ".join(f"{count} x {device}" if count > 1 else device for device, count in devices.items())
    return f"rank{'s' * (len(ranks) > 1)} {numbers} on {on}"


def route_to(address: str) -> str | None:
    """The network interface through which this machine reaches `address`, or None.

    By itself gloo takes the one to which the machine's own name leads, which often is the loopback. That may be so for
    `address` too, on the machine whose name it is: then it is the interface that leads anywhere else.
    """
    for target in (address, _ANYWHERE):
        source = _address_towards(target)
        if source is None or ipaddress.ip_address(source).is_loopback:
            continue
        for interface, addresses in psutil.net_if_addrs().items():
            if source in [each.address.partition("%")[0] for each in addresses]:
                return interface
    return None


def _address_towards(target: str) -> str | None:
    """The address of this machine from which it would send to `target`; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None

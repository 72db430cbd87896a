"""`MultiNode`: data parallelism over several machines, with or without a shared file system."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket

from trainer_kit.config import environment
from trainer_kit.strategies.ddp import DDP, describe_ranks
from trainer_kit.strategies.multinode_session import MultiNodeSession
from trainer_kit.utils.units import format_count

logger = logging.getLogger("trainer_kit")

_ANYWHERE = "192.0.2.1"
"""Documentation address (RFC 5737), used to find the default route; nothing is sent to it."""


class MultiNode(DDP):
    """Data parallelism over the processes of several machines, with the arguments of `DDP`.

    In addition to `DDP`, it logs the ranks of each machine at the start. It sets GLOO_SOCKET_IFNAME, if unset, to the
    network interface that reaches rank 0. It sends a checkpoint to the machines that cannot read its folder.
    """

    spans_machines = True
    session_type = MultiNodeSession
    session: MultiNodeSession

    def setup(self) -> None:
        if self.group.heartbeat is None:
            _choose_interface(self.group.place)
        super().setup()

    def join_group(self) -> None:
        _choose_interface(environment.place())
        super().join_group()

    def _report(self, places: list[tuple[str, str]]) -> None:
        place, machines = self.group.place, dict[int, list[int]]()
        for node, _, rank in sorted(self.collectives.gather_object((place.node, place.local_rank, place.rank))):
            machines.setdefault(node, []).append(rank)
        hosts = [host for host, _ in places]
        self.collectives.hosts, self.session.machines = hosts, machines
        if self.is_main:
            at = f"{place.address}:{place.port}"
            title = f"{self.world_size} processes on {format_count(len(machines), 'machine')}, which meet at {at}"
            lines = [title]
            for node, ranks in machines.items():
                lines.append(f"  machine {node}, {hosts[ranks[0]]}: {describe_ranks(places, ranks)}")
            logger.info("\n".join(lines))


def _choose_interface(place: environment.Place) -> None:
    """Let gloo use the network interface that reaches rank 0, unless the user has chosen one."""
    if not place.has_several_machines or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = route_to(place.address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def route_to(address: str) -> str | None:
    """Return the network interface through which this machine reaches `address`; None if there is none.

    By default gloo uses the interface of the machine's own host name, which often is the loopback. If `address` is
    this machine and resolves to the loopback too, return the interface of the default route.
    """
    import psutil  # takes 6 ms

    for target in (address, _ANYWHERE):
        source = _address_towards(target)
        if source is None or ipaddress.ip_address(source).is_loopback:
            continue
        for interface, addresses in psutil.net_if_addrs().items():
            if source in [each.address.partition("%")[0] for each in addresses]:
                return interface
    return None


def _address_towards(target: str) -> str | None:
    """Return the source address of this machine for packets to `target`; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None

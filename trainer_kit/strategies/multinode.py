"""Several machines, each perhaps with a disk of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainer_kit.strategies.ddp import DDP

logger = logging.getLogger("trainer_kit")

_PIECE_BYTES = 2**24

_LOOKS = (0.0, 0.1, 0.3, 0.6)
"""Seconds before each look for a new file, which a network file system may show late."""

_ANYWHERE = "192.0.2.1"
"""An address that stands for any other machine (RFC 5737); nothing is sent to it."""


class MultiNode(DDP):
    """Trains on the processes of several machines; takes what `DDP` takes.

    Beyond that it says at the start who runs where, lets gloo use the network that leads to the machine of rank 0
    (where GLOO_SOCKET_IFNAME names none), and sends a checkpoint to the machines that do not see its folder.
    """

    spans_machines = True

    _hosts: list[str]  # by rank
    _machines: dict[int, list[int]]  # ranks by machine; each one's first process comes first
    _copied = False  # whether some machine has a copy, and how this process gets rid of its own
    _remove_copy: Callable[[], Any] | None = None

    def setup(self) -> None:
        if self._session is None and self.place.has_several_machines and "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = route_to(self.place.address)
            if interface is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
        super().setup()

    def teardown(self, error: BaseException | None = None) -> None:
        super().teardown(error)
        self._discard()

    def _report(self, places: list[tuple[str, str]]) -> None:
        self._hosts, self._machines = [host for host, _ in places], {}
        for node, _, rank in sorted(self.gather_object((self.place.node, self.local_rank, self.rank))):
            self._machines.setdefault(node, []).append(rank)
        if self.is_main:
            at = f"{self.place.address}:{self.place.port}"
            title = f"{self.world_size} processes on {len(self._machines)} machines, which meet at {at}"
            lines = [
                f"  machine {node}, {self._hosts[ranks[0]]}: {_described(places, ranks)}"
                for node, ranks in self._machines.items()
            ]
            logger.info("\n".join([title, *lines]))

    def _named(self, rank: int) -> str:
        return f"{super()._named(rank)} ({self._hosts[rank]})"

    # Folders

    def announce_output(self, directory: Path) -> None:
        blind = self._ranks_without(directory)
        if self.is_main and blind:
            logger.info(
                "%s is not shared with %s: checkpoints and logs are on %s alone, where rank 0 must run again to resume",
                directory, self._hosts_of(blind), self._hosts[0],
            )  # fmt: skip
        elif self.is_main and self.place.has_several_machines:
            logger.info("%s is shared by all machines", directory)

    def local_copy(self, directory: Path) -> Path:
        """See `Strategy`; copies lie in the folder for temporary files (TMPDIR) until `release_copies`.

        Raises:
            OSError: If a file cannot be read or written, or there is no room, naming the machine.
        """
        blind = self._ranks_without(directory)
        if not blind:
            return directory
        self._discard()
        self._copied = True
        sizes = self.on_main(lambda: _sizes(directory))
        total = sum(sizes.values())
        if self.is_main:
            logger.info(
                "sending %s (%s) to %s, where it is not seen", directory, _mib(total), self._hosts_of(blind)
            )  # fmt: skip
        folder, problems = directory, list[str]()
        if self.rank in blind:
            with _kept_in(problems):
                folder = self._new_folder(total)
        self._raise_any(problems, directory)
        chain = [0, *blind]
        for name, size in sizes.items():
            if self.rank in chain:
                self._pass_on(folder / name, size, chain, problems)
            self._raise_any(problems, directory)  # after each file, lest those without a part in this wait too long
        return self.gather_object(folder)[self._machines[self.place.node][0]]

    def release_copies(self) -> None:
        if self._copied:
            self.barrier()  # all processes of a machine read the same copy
            self._discard()

    def _discard(self) -> None:
        if self._remove_copy is not None:
            self._remove_copy()
        self._copied, self._remove_copy = False, None

    def _ranks_without(self, directory: Path) -> list[int]:
        """The first processes of the machines that do not see the main process's folder of this name.

        The main process puts a file into it for the others to look for; where it cannot, nobody sees it.
        """
        if not self.place.has_several_machines:
            return []
        marker = self.on_main(lambda: _mark(directory))
        try:
            sees = self.gather_object(self.is_main or (self.is_local_main and _appears(marker)))
        finally:
            if self.is_main and marker is not None:
                marker.unlink(missing_ok=True)
        return [ranks[0] for ranks in self._machines.values() if not any(sees[rank] for rank in ranks)]

    def _hosts_of(self, ranks: list[int]) -> str:
        return ", ".join(self._hosts[rank] for rank in ranks)

    def _new_folder(self, needed: int) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="trainer_kit-"))
        self._remove_copy = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(f"{folder.parent} has {_mib(free)} left of the {_mib(needed)} needed")
        return folder

    def _pass_on(self, path: Path, size: int, chain: list[int], problems: list[str]) -> None:
        """Reads a file (the main process) or receives and writes it, and sends it on, all of it whatever goes wrong.

        From machine to machine, piece by piece, so that each sends it once. By the group of all processes, on the
        host: with GPUs to make a group of some would be a collective of all, which the others begin alone, for ever.
        """
        place = chain.index(self.rank)
        if place > 0:
            with _kept_in(problems):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        buffer = torch.empty(min(size, _PIECE_BYTES), dtype=torch.uint8)
        for start in range(0, size, _PIECE_BYTES):
            piece = buffer[: size - start]
            if place > 0:
                with self._watched():
                    dist.recv(piece, chain[place - 1])
            elif not problems:
                with _kept_in(problems):
                    _read_piece(path, start, piece)
            if place + 1 < len(chain):
                with self._watched():
                    dist.send(piece, chain[place + 1])
            if place > 0 and not problems:
                with _kept_in(problems), open(path, "ab") as file:
                    file.write(piece.numpy().data)

    def _raise_any(self, problems: list[str], directory: Path) -> None:
        """Raises on all processes what went wrong on some."""
        if not any(self.sum_numbers([len(problems)])):
            return
        found = [f"{self._named(rank)}: {each[0]}" for rank, each in enumerate(self.gather_object(problems)) if each]
        raise OSError(
            f"{directory} cannot be sent to the machines that do not see it ({'; '.join(found)}); set TMPDIR there to "
            "a folder with room, or put it on a disk that all machines share"
        )


@contextlib.contextmanager
def _kept_in(problems: list[str]) -> Iterator[None]:
    """Keeps what goes wrong with a file for later, when no process waits for this one any more."""
    try:
        yield
    except OSError as error:
        problems.append(str(error))


def _mark(directory: Path) -> Path | None:
    """A new file in the folder; None where it cannot be written."""
    marker = directory / f".seen-{uuid.uuid4().hex}"
    try:
        marker.touch()
    except OSError:
        return None
    return marker


def _appears(marker: Path | None) -> bool:
    if marker is None:
        return False
    for pause in _LOOKS:
        time.sleep(pause)
        with contextlib.suppress(OSError):
            if marker.name in os.listdir(marker.parent):  # which asks a network file system anew
                return True
    return False


def _sizes(directory: Path) -> dict[str, int]:
    """Size of each file below a folder, by its path from there."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _read_piece(path: Path, start: int, piece: torch.Tensor) -> None:
    with open(path, "rb") as file:
        file.seek(start)
        if file.readinto(piece.numpy().data) != len(piece):
            raise OSError(f"{path} has become shorter")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


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

"""The connections of a process group, which a process breaks off to wake a collective that waits for a lost one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator

_FOLDER = "/proc/self/fd"


class Connections:
    """The connections that this process has opened within blocks; none on systems without `/proc`."""

    def __init__(self) -> None:
        self._sockets: dict[int, str] = {}  # the file descriptors, and what they stood for

    @contextlib.contextmanager
    def opened(self, except_port: int) -> Iterator[None]:
        """Enter the block.

        Args:
            except_port: Port of another end whose connections do not belong to the group.
        """
        before = _open_sockets()
        yield
        now = _open_sockets()
        self._sockets |= {
            number: name
            for number, name in now.items()
            if before.get(number) != name and _leads_elsewhere(number, except_port)
        }

    def __len__(self) -> int:
        return len(self._sockets)

    def any_has_ended(self) -> bool:
        """Return whether a connection has been closed, here or on its other end."""
        if any(_name(number) != name for number, name in self._sockets.items()):
            return True
        ends = select.poll()
        for number in self._sockets:
            ends.register(number, select.POLLRDHUP)
        return bool(ends.poll(0))

    def copy(self) -> Connections:
        """Return the connections of today, to which later ones are not added."""
        copied = Connections()
        copied._sockets = dict(self._sockets)
        return copied

    def break_off(self) -> None:
        """Shut the connections down, so that what waits here and on their other ends fails immediately."""
        for number, name in self._sockets.items():
            with contextlib.suppress(OSError), _socket_of(number) as connection:
                if _name(number) == name:  # not another file's number by now
                    connection.shutdown(socket.SHUT_RDWR)
        self._sockets = {}


def _open_sockets() -> dict[int, str]:
    try:
        numbers = [int(number) for number in os.listdir(_FOLDER)]
    except OSError:
        return {}
    names = {number: _name(number) for number in numbers}
    return {number: name for number, name in names.items() if name.startswith("socket:")}


def _name(number: int) -> str:
    try:
        return os.readlink(f"{_FOLDER}/{number}")
    except OSError:  # closed in the meantime
        return ""


def _leads_elsewhere(number: int, except_port: int) -> bool:
    """Return whether a socket is a TCP connection to another port."""
    with contextlib.suppress(OSError), _socket_of(number) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            return bool(connection.getpeername()[1] != except_port)
    return False


def _socket_of(number: int) -> socket.socket:
    return socket.socket(fileno=os.dup(number))

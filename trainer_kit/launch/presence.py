"""`Presence`: learns immediately that a launcher has ended, since the system then closes its connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque

_CONNECT_SECONDS = 5.0
_LONGEST_NAME = 64


class Presence:
    """Keeps a connection of each launcher open, on the machine that serves the store.

    A machine that loses its power or its cable closes nothing: signs of life show it later.

    Attributes:
        port: Port that the launchers connect to.
        ended: Numbers of the launchers whose connections have closed; the reader removes them.
    """

    def __init__(self) -> None:
        self._server = _listen()
        self.port: int = self._server.getsockname()[1]
        self.ended: deque[int] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._done, self._wake = socket.socketpair()
        self._selector.register(self._done, selectors.EVENT_READ)
        self._names: dict[socket.socket, bytes] = {}
        self._thread = threading.Thread(target=self._serve, name="trainer_kit presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections."""
        end_connection(self._wake)
        self._thread.join()

    def _serve(self) -> None:
        with self._selector, self._server, self._done:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._done:
                        for connection in self._names:
                            end_connection(connection)
                        return
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._read(key.fileobj)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has closed already
            connection, _ = self._server.accept()
            self._names[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Read a launcher's number, or the end of its connection."""
        try:
            text = connection.recv(_LONGEST_NAME)
        except OSError:
            text = b""
        self._names[connection] += text
        if text and len(self._names[connection]) <= _LONGEST_NAME:
            return
        self._selector.unregister(connection)
        connection.close()
        name = self._names.pop(connection)
        if name.endswith(b"\n") and name.strip().isdigit():  # anything else is no launcher
            self.ended.append(int(name))


def be_present(address: str, port: int, number: int) -> socket.socket | None:
    """Connect to the `Presence`; return None if a firewall forbids it.

    Args:
        address: Address of the machine that serves the store.
        port: Port of the `Presence`.
        number: Number of this machine's launcher.
    """
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        connection.sendall(f"{number}\n".encode())
    except OSError:
        return None
    return connection


def end_connection(connection: socket.socket) -> None:
    """Close a connection, also where a forked process has inherited it."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))

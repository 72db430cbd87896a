"""The connections of a process group are found, and shut down."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from trainer_kit.strategies.connections import Connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc")


def test_what_waits_is_woken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        earlier = socket.create_connection(server.getsockname())
        connections = Connections()
        with connections.opened(except_port=port):
            own, kept = socket.create_connection(server.getsockname()), socket.create_connection(("127.0.0.1", port))
            local = socket.socketpair()
        assert len(connections) == 1
        others = [server.accept()[0], server.accept()[0]]
        connections.break_off()
        assert own.recv(1) == b""
        assert others[1].recv(1) == b""
        for other in (earlier, kept):
            other.sendall(b"x")
        assert others[0].recv(1) == b"x"
        for each in (earlier, own, kept, *local, *others):
            each.close()


def test_another_file_with_the_same_number_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = Connections()
        with connections.opened(except_port=0):
            own = socket.create_connection(server.getsockname())
        number = own.fileno()
        later = socket.create_connection(server.getsockname())
        os.dup2(later.fileno(), number)
        peers = [server.accept()[0], server.accept()[0]]
        connections.break_off()
        later.sendall(b"x")
        assert peers[1].recv(1) == b"x"
        for each in (own, later, *peers):
            each.close()


@pytest.mark.parametrize("end", ["other", "own", "replaced"])
def test_one_that_has_ended_is_noticed(end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = Connections()
        with connections.opened(except_port=0):
            own = socket.create_connection(server.getsockname())
        lasting = connections.copy()
        with connections.opened(except_port=0):
            later = socket.create_connection(server.getsockname())
        others = [server.accept()[0] for _ in range(2)]
        others[0].sendall(b"x")
        assert not connections.any_has_ended()
        later.close()
        assert connections.any_has_ended()
        assert not lasting.any_has_ended()
        if end == "replaced":
            os.dup2(others[1].fileno(), own.fileno())
        else:
            (own if end == "own" else others[0]).close()
        assert lasting.any_has_ended()
        for each in (own, later, *others):
            each.close()

"""The machine that serves the store hears at once that a launcher has ended."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from kit.ranks import free_port

from trainer_kit.launch.presence import Presence, be_present, end_connection


def wait_for(presence: Presence, count: int) -> list[int]:
    end = time.monotonic() + 10
    while len(presence.ended) < count and time.monotonic() < end:
        time.sleep(0.01)
    return list(presence.ended)


def test_a_closed_connection_ends_a_launcher() -> None:
    presence = Presence()
    stays, leaves = (be_present("127.0.0.1", presence.port, number) for number in (3, 14))
    assert stays is not None
    assert leaves is not None
    leaves.close()
    assert wait_for(presence, 1) == [14]
    presence.close()
    stays.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_killed_launcher_has_ended() -> None:
    presence = Presence()
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        connection = be_present("127.0.0.1", presence.port, 7)
        os.write(done, b"1" if connection is not None else b"0")
        time.sleep(60)
        os._exit(1)
    assert os.read(ready, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert wait_for(presence, 1) == [7]
    presence.close()


def test_what_is_no_launcher_is_ignored() -> None:
    presence = Presence()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000, b""):
        with socket.create_connection(("127.0.0.1", presence.port)) as connection:
            connection.sendall(text)
    last = be_present("127.0.0.1", presence.port, 1)
    assert last is not None
    last.close()
    assert wait_for(presence, 1) == [1]
    presence.close()


def test_a_closed_port_is_no_error() -> None:
    assert be_present("127.0.0.1", free_port(), 1) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_connections_end_though_a_forked_process_has_inherited_them() -> None:
    presence = Presence()
    connection = be_present("127.0.0.1", presence.port, 5)
    assert connection is not None
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(1)
    try:
        end_connection(connection)
        assert wait_for(presence, 1) == [5]
        presence.close()
        end_connection(connection)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

"""Who and where a process is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from trainer_kit.utils.process_identity import process_state, start_time, system_id, user_name


def test_this_process() -> None:
    assert user_name()
    assert system_id() == system_id()
    assert start_time(os.getpid()) == start_time(os.getpid())
    assert process_state(os.getpid()) == "runs"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows stops no processes by signals")
def test_another_process_is_stopped_and_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        started = start_time(other.pid)
        assert started not in (None, start_time(os.getpid()))
        other.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 10
        while process_state(other.pid) != "stopped":
            assert time.monotonic() < end
        other.kill()
        while process_state(other.pid) != "gone":  # a zombie until this process has waited for it
            assert time.monotonic() < end
        other.wait(10)
        assert start_time(other.pid) is None
        assert process_state(other.pid) == "gone"


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("no such user")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert user_name() == (str(os.getuid()) if hasattr(os, "getuid") else "unknown")

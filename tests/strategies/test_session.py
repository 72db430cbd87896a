"""A process among others: what it minds."""

from __future__ import annotations

import os
import sys

import pytest

from trainer_kit.strategies import session


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
@pytest.mark.parametrize("is_joined", [True, False])
def test_threads_are_given_time_before_a_fork(is_joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(session.time, "sleep", slept.append)
    monkeypatch.setattr(session.Session, "current", object() if is_joined else None)
    child = os.fork()
    if child == 0:
        os._exit(0)
    monkeypatch.undo()
    assert os.waitpid(child, 0)[1] == 0
    assert slept == [session._REST_SECONDS] * (is_joined and session._FORKS_MAY_HANG)
    assert not (session._FORKS_MAY_HANG and sys.version_info >= (3, 12))

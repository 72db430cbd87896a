"""Processes that remove the lock of a dead one at the same time leave a new one alone."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.utils import lock_file
from trainer_kit.utils.lock_file import Holder
from trainer_kit.utils.process_identity import system_id
from trainer_kit.utils.run_lock import NAME, RunLock


@pytest.mark.parametrize("has_links", [True, False])
def test_a_late_remover_leaves_the_new_lock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """It saw the dead one; meanwhile another start has taken the folder."""
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    dead = Holder("token", "ann", socket.gethostname(), system_id(), 2**22 + 1, "1", 0.0)
    lock_file.write_new(tmp_path / NAME, dead)
    seen = lock_file.look(tmp_path / NAME)
    assert seen is not None
    lock = RunLock(tmp_path)
    lock.acquire()
    before = json.loads((tmp_path / NAME).read_text())["token"]
    lock_file.remove(tmp_path / NAME, seen)
    monkeypatch.setattr(lock_file, "look", lambda path, real=lock_file.look: seen if path.name == NAME else real(path))
    lock_file.remove(tmp_path / NAME, seen)  # as if it looked just before
    monkeypatch.undo()
    assert json.loads((tmp_path / NAME).read_text())["token"] == before
    lock.confirm()
    lock.release()
    assert os.listdir(tmp_path) == []


def no_links(*paths: Any) -> None:
    raise PermissionError("no hard links here")

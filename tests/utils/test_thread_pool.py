"""torch's thread pool in a forked process."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.utils.thread_pool import renew_thread_pool


def test_the_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    renew_thread_pool()
    assert set_to == [3]

"""Test the launcher's agent: what it takes the end of a rank for."""

from __future__ import annotations

import sys
import time

import pytest

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.processes import run_processes


def test_a_rank_that_fails_between_two_questions_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent asks for exit codes, then for news of other machines, which can take longer than the rank lives."""
    monkeypatch.setattr(Machines, "news", lambda self, at_once=False: time.sleep(1))
    words = ["-c", "import time; time.sleep(0.4); raise ValueError('late')"]
    with pytest.raises(ProcessFailed, match=r"rank 0 on .* left with exit code 1"):
        run_processes(LaunchConfig(num_processes=1, cpu=True), sys.executable, words)

"""Scripts whose training is taken over, run in the process of a test."""

from __future__ import annotations

import sys
from typing import NoReturn

import pytest

from trainer_kit import Trainer


class Left(BaseException):
    """In place of the end of this process; its argument is the exit code."""


def leave(code: int) -> NoReturn:
    raise Left(code)


def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets scripts be run in this process, which does not end with them and is as before afterwards."""
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    monkeypatch.setattr("trainer_kit.tools.takeover.leave", leave)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

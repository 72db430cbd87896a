"""Scripts whose training is taken over, run in the process of a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from trainer_kit import Trainer


class Left(BaseException):
    """In place of the end of this process; its argument is the exit code."""


def leave(code: int) -> NoReturn:
    raise Left(code)


def written_here(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a script of this text.

    It may be run in this process, which does not end with it and is as before afterwards.
    """
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    monkeypatch.setattr("trainer_kit.tools.script_runner.leave", leave)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    path = folder / "train.py"
    path.write_text(text)
    return str(path)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_kit import TrainingArguments
from trainer_kit.launch.failures import Failure, read_failure, write_failure


def written(error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch) -> Failure:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path / "error.json"))
    write_failure(error, own_files=[])
    return read_failure(1, 1, str(path / "error.json"), "")


def raised(call: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever it is
        call()
    return caught.value


def test_a_refusal_ends_at_the_users_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        TrainingArguments(learning_rate=-1.0)

    failure = written(raised(refused), tmp_path, monkeypatch)
    assert failure.traceback.rstrip().endswith("it must be a finite number of at least 0")
    assert "TrainingArguments(learning_rate=-1.0)" in failure.traceback
    assert "trainer_kit/" not in failure.traceback


def test_an_error_that_is_no_refusal_keeps_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    args.log_dir  # noqa: B018
    args.logging_dir = 3  # type: ignore[assignment]

    failure = written(raised(lambda: args.log_dir), tmp_path, monkeypatch)
    assert failure.error.startswith("TypeError: ")
    assert "trainer_kit/config/arguments.py" in failure.traceback


def test_the_users_own_error_is_told_in_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None:
        raise KeyError("mine")

    failure = written(raised(inner), tmp_path, monkeypatch)
    assert failure.error == "KeyError: 'mine'"
    assert "in inner" in failure.traceback
    report = failure.report()
    assert (report.rank, report.exit_code) == (1, 1)
    assert str(report).rstrip().endswith("KeyError: 'mine'")
    extra = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert extra["py_callstack"] == failure.traceback

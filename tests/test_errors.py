"""Exceptions that a user can catch."""

from __future__ import annotations

import pytest

from trainer_kit import errors
from trainer_kit.errors import ProcessesLeft, ProcessFailed, TrainerKitError


def test_all_have_one_base_and_the_kind_that_python_has_for_them() -> None:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert all(issubclass(kind, TrainerKitError) and kind.__doc__ for kind in found)
    of_python = {
        kind.__name__: next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins") for kind in found
    }
    assert of_python["CheckpointError"] == of_python["FolderInUseError"] == of_python["ReadOnceError"] == "ValueError"
    assert of_python["CallbackError"] == of_python["DataError"] == of_python["LostProcessError"] == "RuntimeError"
    assert (of_python["SaveError"], of_python["NonFiniteError"]) == ("OSError", "ArithmeticError")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"traceback": "Traceback\nValueError: boom\n"}, "rank 1 failed:\nTraceback\nValueError: boom"),
        ({"tail": "not today\n"}, "rank 1 failed; the last that it wrote:\nnot today"),
        ({"traceback": "Traceback", "tail": "not today"}, "rank 1 failed:\nTraceback"),
        ({}, "rank 1 failed"),
    ],
)
def test_a_failed_process_shows_the_best_that_it_left(given: dict[str, str], shown: str) -> None:
    error = ProcessFailed("rank 1 failed", 1, 3, **given)
    assert str(error) == shown
    assert (error.message, error.rank, error.exit_code) == ("rank 1 failed", 1, 3)


@pytest.mark.parametrize(("code", "asked"), [(130, "Ctrl-C"), (143, "a signal")])
def test_processes_that_left_say_what_asked_them(code: int, asked: str) -> None:
    assert str(ProcessesLeft(code)).startswith(f"the processes left after {asked} (exit code {code});")

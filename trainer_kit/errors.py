"""Every exception of trainer_kit that a user can catch.

`TrainerKitError`, or any of Python's own classes that stand beside it, catches them:

- `CallbackError` (RuntimeError)
- `CheckpointError` (ValueError): `UnreadableError`
- `DataError` (RuntimeError): `WorkerError`
- `EvaluationInterrupted`, `DoesNotFitError`
- `FolderInUseError` (ValueError)
- `LostProcessError`, `ProcessFailed`, `ProcessesLeft` (RuntimeError)
- `NonFiniteError` (ArithmeticError)
- `ReadOnceError` (ValueError)
- `SaveError` (OSError)
- `ScriptFailed` (RuntimeError)

Invalid arguments and models raise plain ValueError and TypeError.
"""

from __future__ import annotations

from typing import Any


class TrainerKitError(Exception):
    """The base of all."""


class CallbackError(TrainerKitError, RuntimeError):
    """A callback raised: the message names the callback and the hook, `__cause__` is the callback's own error."""


class CheckpointError(TrainerKitError, ValueError):
    """A checkpoint or one of its files is missing, damaged or not to be trusted; the message names it."""


class UnreadableError(CheckpointError):
    """Nothing is known of a checkpoint: the system does not let it be read, or it is of another format version."""


class DataError(TrainerKitError, RuntimeError):
    """A dataset raised; the message names the sample, `__cause__` is the dataset's own error."""


class WorkerError(DataError):
    """A DataLoader worker gave no batch: it was ended from outside, is stopped, or takes too long."""


class ReadOnceError(TrainerKitError, ValueError):
    """A dataset that can be read only once: what is looked at would be missing in training."""


class FolderInUseError(TrainerKitError, ValueError):
    """Another training holds the folder; the message says who and since when."""


class SaveError(TrainerKitError, OSError):
    """A checkpoint could not be written; the message says which and why. Earlier ones are as they were."""


class NonFiniteError(TrainerKitError, ArithmeticError):
    """The loss or a gradient was not finite, with `nonfinite="stop"` or "rollback".

    Attributes:
        span: The step; None in an error that came from another process.
        parameter: Name of the first parameter with a gradient that is not finite; None where all are.
        held: Whether the model's weights are those from before the step.
    """

    def __init__(self, message: str, span: Any = None, parameter: str | None = None, held: bool = False) -> None:
        super().__init__(message)
        self.span = span
        self.parameter = parameter
        self.held = held


class EvaluationInterrupted(TrainerKitError):
    """The run was asked to leave (Ctrl-C, a preempted machine) before the evaluation ended."""


class DoesNotFitError(TrainerKitError):
    """A batch of the evaluation did not fit into a device's memory; the text is the device's."""


class LostProcessError(TrainerKitError, RuntimeError):
    """Another process of the run is gone, or does not answer."""


class ProcessFailed(TrainerKitError, RuntimeError):
    """A process of a run failed, and with it the run.

    Attributes:
        message: What happened to which rank.
        rank: The first rank that failed.
        exit_code: Its exit code, minus the signal's number where a signal ended it; None if it had to be ended after
            its error.
        traceback: Its own traceback; empty where it left none.
        tail: The last lines that it wrote to its file of errors, where it left no traceback.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None, traceback: str = "", tail: str = "") -> None:
        details = f":\n{traceback}" if traceback else f"; the last that it wrote:\n{tail}" if tail else ""
        super().__init__(f"{message}{details}".rstrip())
        self.message = message
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback
        self.tail = tail


class ProcessesLeft(TrainerKitError, RuntimeError):
    """The processes of a run left in good order because they were told to.

    Attributes:
        exit_code: 143 after SIGTERM and the like, which means "start me again", or 130 after Ctrl-C.
    """

    def __init__(self, exit_code: int) -> None:
        asked = "Ctrl-C" if exit_code == 130 else "a signal"
        super().__init__(f"the processes left after {asked} (exit code {exit_code}); start them again to resume")
        self.exit_code = exit_code


class ScriptFailed(TrainerKitError, RuntimeError):
    """A start of the script ended otherwise than it should have; the message ends with what it wrote last."""

"""The exceptions that trainer_kit raises.

Catch `TrainerKitError` for all of them, or the built-in class in parentheses:

- `CallbackError` (RuntimeError)
- `CheckpointError` (ValueError): `UnreadableError`
- `CutOffError` (ConnectionError)
- `DataError` (RuntimeError): `WorkerError`
- `DistributedOperationException` (ValueError)
- `EvaluationInterrupted`, `DoesNotFitError`
- `FolderInUseError` (ValueError)
- `LostProcessError`, `ProcessFailed`, `ProcessesLeft` (RuntimeError)
- `NonFiniteError` (ArithmeticError)
- `ReadOnceError` (ValueError)
- `SaveError` (OSError)
- `ScriptFailed` (RuntimeError)

Invalid arguments and models raise a plain ValueError or TypeError.
"""

from __future__ import annotations

from typing import Any


class TrainerKitError(Exception):
    """Base class of all exceptions of trainer_kit."""


class CallbackError(TrainerKitError, RuntimeError):
    """A callback raised an error.

    The message names the callback and the hook; `__cause__` is the callback's own error.
    """


class CheckpointError(TrainerKitError, ValueError):
    """A checkpoint or one of its files is missing, damaged or unsafe to load; the message names it."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be judged: the system refuses to read it, or it has another format version."""


class CutOffError(TrainerKitError, ConnectionError):
    """The other machines of an elastic run may still be training without this one, which must then stop.

    Start it again to join them.
    """


class DataError(TrainerKitError, RuntimeError):
    """A dataset raised; the message names the sample, `__cause__` is the dataset's own error."""


class WorkerError(DataError):
    """A DataLoader worker returned no batch: it was killed, is stopped, or exceeded the timeout."""


class ReadOnceError(TrainerKitError, ValueError):
    """A dataset can be read only once, so that samples inspected before training would be missing from it."""


class FolderInUseError(TrainerKitError, ValueError):
    """Another training holds the output folder; the message names the holder and the time."""


class SaveError(TrainerKitError, OSError):
    """A checkpoint could not be written; the message says which and why. Earlier checkpoints are intact."""


class NonFiniteError(TrainerKitError, ArithmeticError):
    """The loss or a gradient was not finite, with `nonfinite="stop"` or `nonfinite="rollback"`.

    Attributes:
        span: The step, a `StepSpan`; None if it is not known.
        parameter: Name of the first parameter whose gradient is not finite; None if all gradients are finite.
        held: Whether the model still has its weights from before the step.
    """

    def __init__(self, message: str, span: Any = None, parameter: str | None = None, held: bool = False) -> None:
        super().__init__(message)
        self.span = span
        self.parameter = parameter
        self.held = held


class DistributedOperationException(TrainerKitError, ValueError):
    """In debug mode, the processes gave a collective operation tensors of different shapes; the message lists them."""


class EvaluationInterrupted(TrainerKitError):
    """A request to exit (Ctrl-C, preemption) ended an evaluation before it was complete."""


class DoesNotFitError(TrainerKitError):
    """An evaluation batch did not fit into the device's memory; the message is the device's own."""


class LostProcessError(TrainerKitError, RuntimeError):
    """Another process of the run has ended or does not answer.

    Attributes:
        waited: Seconds that this process was in the call that failed because of it, as it waited for the other one.
    """

    waited = 0.0


class ProcessFailed(TrainerKitError, RuntimeError):
    """A process of a run failed, which ended the run.

    Attributes:
        message: Description of the failure, including the rank.
        rank: The first rank that failed; -1 if a whole machine is lost.
        exit_code: Exit code of that rank, the negative signal number if a signal ended it; None if the launcher had
            to end the process after its error.
        traceback: Traceback of that rank; empty if it left none.
        tail: Last lines of that rank's stderr file if it left no traceback, else empty.
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
    """The processes of a run exited cleanly on request.

    Attributes:
        exit_code: 143 after a signal such as SIGTERM, which asks for a restart; 130 after Ctrl-C.
    """

    def __init__(self, exit_code: int) -> None:
        asked = "Ctrl-C" if exit_code == 130 else "a signal"
        super().__init__(f"the processes left after {asked} (exit code {exit_code}); start them again to resume")
        self.exit_code = exit_code


class ScriptFailed(TrainerKitError, RuntimeError):
    """A run of the script did not end as expected; the message ends with the script's last output."""

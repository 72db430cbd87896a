"""`Deterministic` and `DetectAnomaly`: modes of torch for the time of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class _Mode(Callback):
    """Switch a mode on while a run trains, and restore it afterwards."""

    def __init__(self) -> None:
        self._before: Any = None

    def on_train_begin(self, run: Run) -> None:
        self._restore()
        self._before = self.get()
        self.switch_on()

    def on_exit(self, run: Run) -> None:
        self._restore()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            self.set(self._before)
            self._before = None

    def get(self) -> tuple[Any, ...]:
        """Return the settings of the mode."""
        raise NotImplementedError

    def set(self, settings: tuple[Any, ...]) -> None:
        """Restore the settings of the mode."""
        raise NotImplementedError

    def switch_on(self) -> None:
        """Switch the mode on."""
        raise NotImplementedError


class Deterministic(_Mode):
    """Use only deterministic algorithms of torch in training: an operation without one raises an error.

    Trainings on the same machine then agree bit for bit on GPUs too, more slowly. cuBLAS needs the environment variable
    CUBLAS_WORKSPACE_CONFIG=:4096:8. See `torch.use_deterministic_algorithms`.

    Args:
        warn_only: Whether an operation without a deterministic algorithm warns instead of raising an error.
    """

    def __init__(self, warn_only: bool = False) -> None:
        super().__init__()
        self.warn_only = warn_only

    def get(self) -> tuple[Any, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )

    def set(self, settings: tuple[Any, ...]) -> None:
        is_on, warn_only, torch.backends.cudnn.benchmark = settings
        torch.use_deterministic_algorithms(is_on, warn_only=warn_only)

    def switch_on(self) -> None:
        self.set((True, self.warn_only, False))


class DetectAnomaly(_Mode):
    """Find the operation of the forward pass whose gradient is NaN: the error has its stack trace.

    Training is several times slower. See `torch.autograd.set_detect_anomaly`.
    """

    def get(self) -> tuple[Any, ...]:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def set(self, settings: tuple[Any, ...]) -> None:
        is_on, checks_nan = settings
        torch.autograd.set_detect_anomaly(is_on, check_nan=checks_nan)

    def switch_on(self) -> None:
        self.set((True, True))

"""`WriteErrors`: write errors that do not end a training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

logger = logging.getLogger("trainer_kit")


class WriteErrors:
    """Errors of one destination, such as a full disk: the first is logged, the others until it recovers are not.

    Args:
        sentence: Beginning of the warning, before the error.
        reset: Called after each error, so that the next write opens the destination again.
        errors: Class of the errors.

    Attributes:
        is_failing: Whether the last write failed.
    """

    def __init__(
        self, sentence: str, reset: Callable[[], object] | None = None, errors: type[Exception] = OSError
    ) -> None:
        self.sentence = sentence
        self.is_failing = False
        self._reset = reset
        self._kind = errors

    @contextlib.contextmanager
    def warned(self) -> Iterator[None]:
        """Log an error in this context as a warning instead of raising it."""
        try:
            yield
            self.is_failing = False
        except self._kind as error:
            failed_before, self.is_failing = self.is_failing, True  # set before the warning, which may be written there
            if not failed_before:
                logger.warning("%s: %s; training continues", self.sentence, self._reason(error))
            if self._reset is not None:
                with contextlib.suppress(OSError):
                    self._reset()

    def _reason(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return f"{type(error).__name__}: {error}"
        reason = error.strerror or str(error)
        is_named = error.filename is None or str(error.filename) in self.sentence
        return reason if is_named else f"{error.filename}: {reason}"

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

    Attributes:
        is_failing: Whether the last write failed.
    """

    def __init__(self, sentence: str, reset: Callable[[], object] | None = None) -> None:
        self.sentence = sentence
        self.is_failing = False
        self._reset = reset

    @contextlib.contextmanager
    def warned(self) -> Iterator[None]:
        """Log an OSError in this context as a warning instead of raising it."""
        try:
            yield
            self.is_failing = False
        except OSError as error:
            failed_before, self.is_failing = self.is_failing, True  # set before the warning, which may be written there
            if not failed_before:
                logger.warning("%s: %s; training continues", self.sentence, self._reason(error))
            if self._reset is not None:
                with contextlib.suppress(OSError):
                    self._reset()

    def _reason(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        is_named = error.filename is None or str(error.filename) in self.sentence
        return reason if is_named else f"{error.filename}: {reason}"

"""`get_logger`: loggers that write on selected processes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from trainer_kit.accelerator.state import PartialState
from trainer_kit.config import environment

__all__ = ["MultiProcessAdapter", "get_logger"]

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    _LoggerAdapter = logging.LoggerAdapter  # takes no type arguments before Python 3.11


class MultiProcessAdapter(_LoggerAdapter):
    """A logger whose calls take `main_process_only` (True unless given) and `in_order`."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message. What any process may write begins with the process's rank, as `[RANK 1]`.

        Args:
            level: Level of the message.
            msg: The message.
            args: Its arguments.
            kwargs: Arguments of `logging.Logger.log`; `main_process_only`: whether only the main process writes;
                `in_order`: whether all processes write, one after another, which makes the call collective and
                `main_process_only` of no effect.
        """
        only_main, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        rank = environment.place().rank  # needs no process group, which may come later
        kwargs.setdefault("stacklevel", 2)
        text, options = self.process(msg, kwargs)
        turns: Iterable[int] = [0]
        if in_order or not only_main:
            text = f"[RANK {rank}] {text}"
            turns = range(PartialState().num_processes) if in_order else [rank]
        for turn in turns:
            if turn == rank:
                self.logger.log(level, text, *args, **options)
            if in_order:
                PartialState().wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message and its options unchanged."""
        return msg, kwargs

    @functools.cache  # noqa: B019  # an adapter lives as long as its logger
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time that it is called with these arguments."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that writes on selected processes: by default on the main one.

    Args:
        name: Name of the logger, such as `__name__`.
        log_level: Level below which messages are dropped; None: as logging is configured.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})

"""`SaveMeeting`: finds out whether all processes save, or the main one alone."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.utils.user_warnings import user_lines, warn

logger = logging.getLogger("trainer_kit")

_PATIENCE = 60.0
"""Seconds after which a wait for other processes is logged."""


class SaveMeeting:
    """Where processes meet before a save.

    Scripts written for accelerate, such as those of diffusers, save under `is_main_process`. The other processes then
    continue to train, and wait for the main one in their next collective. The main process finds that out once for each
    place in the script that saves.
    """

    def __init__(self) -> None:
        self._known: set[tuple[tuple[str, int], ...]] = set()  # calls, by their lines, that only the main process makes

    @contextlib.contextmanager
    def together_or_alone(self, strategy: Strategy, is_within_step: bool) -> Iterator[bool]:
        """Wait for the other processes; yield whether this one, the main process, saves without them.

        Args:
            strategy: The strategy. Its collectives are replaced meanwhile by those of a process that is alone.
            is_within_step: Whether gradients of an optimizer step are being accumulated.

        Raises:
            LostProcessError: If another process has failed, or does not answer.
            ValueError: If this process cannot save without those that do not come.
        """
        collectives = strategy.collectives
        if collectives.is_alone:  # neither a thread nor a walk over the stack
            yield False
            return
        lines = user_lines()
        is_known = strategy.is_main and lines in self._known
        others = [] if is_known else _find_absent(collectives)
        if not (is_known or others):
            yield False
            return
        if obstacle := _obstacle(strategy, is_within_step, others):
            where = f", but {'; '.join(others)}" if others else " alone"
            raise ValueError(
                f"rank {strategy.rank} calls save_state(){where}; call it on all processes, since {obstacle}"
            )
        if not is_known:
            self._known.add(lines)
            warn(
                f"only the main process calls save_state() here ({'; '.join(others)}): the checkpoint lacks the random "
                "generators of the others, so that a resume is not bitwise equal; call it on all processes, not under "
                "is_main_process"
            )
        try:
            strategy.collectives = Collectives(strategy.rank, collectives.local_rank, strategy.world_size)
            yield True
        finally:
            strategy.collectives = collectives


def _find_absent(collectives: Collectives) -> list[str]:
    """Return where the processes are that do not come; log it if that takes long."""
    sentence = "save_state() has waited for other processes for %g s; call it on all of them, not under is_main_process"
    timer = threading.Timer(_PATIENCE, logger.warning, [sentence, _PATIENCE])
    timer.daemon = True
    timer.start()
    try:
        return collectives.find_absent()
    finally:
        timer.cancel()


def _obstacle(strategy: Strategy, is_within_step: bool, others: Sequence[str]) -> str:
    """Return why this process needs the others; empty if it does not."""
    if others and len(others) < strategy.world_size - 1:
        return "some of the others do"
    if not strategy.is_main:
        return "the main process writes"
    if threading.current_thread() is not threading.main_thread():
        return "another thread may exchange with them meanwhile"
    if strategy.sharding.is_active:
        return "models are sharded"
    return "gradients are being accumulated" if is_within_step else ""

"""`SaveMeeting`: finds out whether all processes save, or the main one alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.utils.user_warnings import user_line, warn


class SaveMeeting:
    """Where processes meet before a save.

    Scripts written for accelerate, such as those of diffusers, save under `is_main_process`. The other processes then
    continue to train, and wait for the main one in their next collective. The main process finds that out once for each
    line that saves.
    """

    def __init__(self) -> None:
        self._lines: set[tuple[str, int] | None] = set()  # that only the main process runs

    @contextlib.contextmanager
    def entered(self, strategy: Strategy, is_within_step: bool) -> Iterator[bool]:
        """Wait for the other processes; yield whether this one, the main process, saves without them.

        Args:
            strategy: The strategy, which does not exchange with other processes then.
            is_within_step: Whether gradients of an optimizer step are being accumulated.

        Raises:
            LostProcessError: If another process has ended, or does not answer.
            ValueError: If this process cannot save without those that wait elsewhere.
        """
        line, collectives = user_line(), strategy.collectives
        is_known = strategy.is_main and line in self._lines
        others = [] if is_known else collectives.find_absent()
        if not (is_known or others):
            yield False
            return
        if obstacle := _obstacle(strategy, is_within_step, others):
            where = f", but {'; '.join(others)}" if others else " alone"
            raise ValueError(
                f"rank {strategy.rank} calls save_state(){where}; call it on all processes, since {obstacle}"
            )
        if not is_known:
            self._lines.add(line)
            warn(
                f"only the main process calls save_state() here ({'; '.join(others)}): the checkpoint lacks the random "
                "generators of the others, so that a resume is not bitwise equal; call it on all processes, not under "
                "is_main_process"
            )
        strategy.collectives = Collectives(strategy.rank, collectives.local_rank, strategy.world_size)
        try:
            yield True
        finally:
            strategy.collectives = collectives


def _obstacle(strategy: Strategy, is_within_step: bool, others: Sequence[str]) -> str:
    """Return why this process needs the others; empty if it does not."""
    if others and len(others) < strategy.world_size - 1:
        return "some of the others do"
    if not strategy.is_main:
        return "the main process writes"
    if strategy.sharding.is_active:
        return "models are sharded"
    return "gradients are being accumulated" if is_within_step else ""

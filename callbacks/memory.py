"""`Memory`: how much memory the run takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class Memory(Callback):
    """Adds the strategy's memory figures to every record: `memory_gib` and `peak_memory_gib`, in GiB."""

    def metrics(self, run: Run) -> dict[str, Any]:
        return dict(run.strategy.memory())

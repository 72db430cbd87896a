"""The state of a run that checkpoints hold, for tests that write checkpoints without a training."""

from __future__ import annotations

from typing import Any

from trainer_kit.state import TrainState


def trainer_state(
    step: int, committed: list[list[Any]], run_id: str, best: tuple[float, int] | tuple[None, None]
) -> dict[str, Any]:
    """As the Trainer writes it after `step` steps of one sample each; `best` is a metric and its step."""
    counters = TrainState(step=step, position=step, samples=step, best_metric=best[0], best_step=best[1])
    return {
        "counters": counters.state_dict(),
        "committed": committed,
        "run_id": run_id,
        "evaluate": False,
        "shifts_labels": None,
        "dataset_length": 10_000,
        "seed": 1,
        "optimizer": "SGD",
        "lr_scheduler": "Schedule",
        "plan": {"processes": 1, "batch_size": 1, "accumulation": 1, "units": {"warmup_steps": 1}},
    }

from __future__ import annotations

from collections.abc import Callable

from trainer_kit.callbacks import Memory
from trainer_kit.run import Run


def test_figures_are_those_of_the_strategy(make_run: Callable[..., Run]) -> None:
    run = make_run()
    figures = Memory().metrics(run)
    assert figures.keys() == run.strategy.memory().keys() >= {"memory_gib", "peak_memory_gib"}
    assert (
        0.01 < figures["memory_gib"] < figures["peak_memory_gib"] + 0.01 < 1000
    )  # the two are read one after the other

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.callback import CallbackList
from trainer_kit.callbacks import Checkpointing
from trainer_kit.run import Run


def saved_steps(run: Run, take_step: Callable[[Run], None], metrics: dict[int, float], steps: int = 10) -> list[int]:
    """Goes through a run as the loop does, with an evaluation after each step in `metrics`; greater is better."""
    events, saved = CallbackList([Checkpointing()]), []

    def serve() -> None:
        if run.state.step in metrics and run.requests.evaluate:
            value = metrics[run.state.step]
            if run.state.best_metric is None or value > run.state.best_metric:
                run.state.best_metric, run.state.best_step = value, run.state.step
            events.call("on_evaluate", run, {"eval_x": value})
        if run.requests.save:
            saved.append(run.state.step)
            events.call("on_save", run, Path(f"checkpoint-{run.state.step}"))
        run.requests.save = run.requests.evaluate = False

    events.call("on_train_begin", run)
    while run.state.step < steps:
        take_step(run)
        events.call("on_step_end", run)
        if run.state.position == 0:
            events.call("on_epoch_end", run)
        run.requests.evaluate = run.state.step in metrics
        serve()
    events.call("on_train_end", run, None)
    serve()
    return saved


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"save_strategy": "steps", "save_steps": 4}, [4, 8, 10]),
        ({"save_strategy": "steps", "save_steps": 5}, [5, 10]),
        ({"save_strategy": "steps", "save_steps": 500}, [10]),
        ({"save_strategy": "epoch"}, [5, 10]),
        ({"save_strategy": "no"}, []),
    ],
)
def test_when_it_asks(
    make_run: Callable[..., Run], take_step: Callable[[Run], None], arguments: dict[str, Any], expected: list[int]
) -> None:
    assert saved_steps(make_run(**arguments), take_step, {}) == expected


def test_best_saves_each_new_best_and_the_end(make_run: Callable[..., Run], take_step: Callable[[Run], None]) -> None:
    run = make_run(save_strategy="best", eval_strategy="steps", eval_steps=2)
    assert saved_steps(run, take_step, {2: 0.5, 4: 0.4, 6: 0.7, 8: 0.7}) == [2, 6, 10]


def test_the_best_is_saved_though_no_step_is_due(
    make_run: Callable[..., Run], take_step: Callable[[Run], None]
) -> None:
    run = make_run(load_best_model_at_end=True, eval_strategy="steps", eval_steps=3, save_steps=100)
    assert saved_steps(run, take_step, {3: 0.1, 6: 0.9, 9: 0.2}) == [3, 6, 10]


def test_without_a_best_to_keep_evaluations_save_nothing(
    make_run: Callable[..., Run], take_step: Callable[[Run], None]
) -> None:
    run = make_run(eval_strategy="steps", eval_steps=3, save_steps=100)
    assert saved_steps(run, take_step, {3: 0.1}) == [10]


def test_a_run_that_took_no_step_saves_nothing(make_run: Callable[..., Run], take_step: Callable[[Run], None]) -> None:
    run = make_run()
    run.state.step = 10
    assert saved_steps(run, take_step, {}) == []

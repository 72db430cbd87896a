from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from trainer_kit.callbacks import EarlyStopping
from trainer_kit.run import Run


def stops_after(run: Run, callback: EarlyStopping, name: str, values: list[float]) -> int | None:
    """The number of evaluations after which it asks to stop."""
    callback.on_train_begin(run)
    for count, value in enumerate(values, start=1):
        run.state.step += 1
        callback.on_evaluate(run, {name: value, "eval_other": 0.0})
        if run.requests.stop:
            return count
    return None


@pytest.mark.parametrize(
    ("options", "name", "values", "expected"),
    [
        ({"patience": 2}, "eval_loss", [3, 2, 1, 0.5], None),
        ({"patience": 2}, "eval_loss", [3, 2, 2, 2], 4),
        ({"patience": 2}, "eval_loss", [3, 4, 2, 4, 1, 1, 1], 7),
        ({"patience": 1}, "eval_loss", [3, 3], 2),
        ({"patience": 2, "min_delta": 0.5}, "eval_loss", [3, 2.6, 2.5], 3),
        ({"patience": 2, "min_delta": 0.5}, "eval_loss", [3, 2.6, 2.4, 2.3, 1.8], None),
        ({"patience": 2, "metric": "accuracy"}, "eval_accuracy", [0.1, 0.2, 0.1, 0.2], 4),
        ({"patience": 2, "metric": "eval_accuracy"}, "eval_accuracy", [0.1, 0.2, 0.3, 0.4], None),
        ({"patience": 2, "metric": "error", "greater_is_better": False}, "eval_error", [3, 2, 1], None),
        ({"patience": 2}, "eval_loss", [math.nan, math.nan], 2),
        ({"patience": 2}, "eval_loss", [1, math.nan, 0.5, math.nan, math.nan], 5),
    ],
)
def test_when_it_stops(
    make_run: Callable[..., Run], options: dict[str, Any], name: str, values: list[float], expected: int | None
) -> None:
    run = make_run(eval_strategy="epoch")
    assert stops_after(run, EarlyStopping(**options), name, values) == expected


def test_a_resume_with_another_metric_begins_again(make_run: Callable[..., Run]) -> None:
    run = make_run(eval_strategy="epoch")
    before = EarlyStopping(patience=2)
    assert stops_after(run, before, "eval_loss", [0.1, 0.2]) is None
    for options, name, expected in (({}, "eval_loss", 1), ({"metric": "accuracy"}, "eval_accuracy", None)):
        after = EarlyStopping(patience=2, **options)
        after.load_state_dict(before.state_dict())
        assert stops_after(run, after, name, [0.05 if options else 0.3, 0.06]) == expected
        run.requests.stop = False
    with pytest.raises(ValueError, match="is not a metric's name"):
        before.load_state_dict({**before.state_dict(), "judged_by": ["loss"]})


def test_small_improvements_add_up_unlike_those_of_transformers(make_run: Callable[..., Run]) -> None:
    values = [3, 2.75, 2.375, 2.25, 1.75]
    run = make_run(eval_strategy="epoch")
    assert stops_after(run, EarlyStopping(patience=2, min_delta=0.5), "eval_loss", values) is None
    theirs, control = transformers.EarlyStoppingCallback(2, 0.5), transformers.TrainerControl()
    args: Any = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    state, seen = transformers.TrainerState(), 0
    for value in values:
        theirs.on_evaluate(args, state, control, {"eval_loss": value})
        state.best_metric, seen = min(value, state.best_metric or math.inf), seen + 1
        if control.should_training_stop:
            break
    assert seen == 3


def test_the_arguments_say_which_metric_and_what_is_better(make_run: Callable[..., Run]) -> None:
    run = make_run(eval_strategy="epoch", metric_for_best_model="error", greater_is_better=False)
    assert stops_after(run, EarlyStopping(1), "eval_error", [3, 2, 1, 1]) == 4


def test_a_resumed_count_goes_on(make_run: Callable[..., Run]) -> None:
    first, second = EarlyStopping(3), EarlyStopping(3)
    assert stops_after(make_run(eval_strategy="epoch"), first, "eval_loss", [1, 2, 2]) is None
    second.load_state_dict(first.state_dict())
    assert stops_after(make_run(eval_strategy="epoch"), second, "eval_loss", [1.5, 0.5]) == 1


def test_a_run_that_had_stopped_asks_again_when_resumed(make_run: Callable[..., Run]) -> None:
    first, second, patient = EarlyStopping(1), EarlyStopping(1), EarlyStopping(2)
    stops_after(make_run(eval_strategy="epoch"), first, "eval_loss", [1, 2])
    for callback, expected in ((second, True), (patient, False)):
        run = make_run(eval_strategy="epoch")
        callback.load_state_dict(first.state_dict())
        callback.on_train_begin(run)
        assert run.requests.stop is expected


def test_a_metric_that_is_not_there_is_named_with_those_that_are(make_run: Callable[..., Run]) -> None:
    with pytest.raises(ValueError, match=r"'eval_f1'.*'eval_loss', 'eval_runtime'"):
        EarlyStopping(metric="f1").on_evaluate(make_run(), {"eval_loss": 1.0, "eval_runtime": 2.0})


def test_the_evaluation_before_the_first_step_does_not_count(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(eval_strategy="epoch"), EarlyStopping(patience=1)
    callback.on_evaluate(run, {"eval_loss": 1.0})
    assert stops_after(run, callback, "eval_loss", [3, 2, 2]) == 3


def test_it_needs_evaluations(make_run: Callable[..., Run]) -> None:
    with pytest.raises(ValueError, match="eval_strategy='no'"):
        EarlyStopping().on_train_begin(make_run())


@pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -0.1}, {"min_delta": math.nan}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        EarlyStopping(**options)


def test_another_metric_than_that_of_the_best_model_is_a_warning(make_run: Callable[..., Run]) -> None:
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    message = (
        "watches eval_f1, but load_best_model_at_end=True loads the best model by eval_loss; set metric_for_best_model="
    )
    with pytest.warns(UserWarning, match=message):
        EarlyStopping(2, metric="f1").on_train_begin(make_run(**options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EarlyStopping(2, metric="f1").on_train_begin(make_run(**options, metric_for_best_model="f1"))
        EarlyStopping(2).on_train_begin(make_run(**options))

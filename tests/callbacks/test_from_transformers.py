from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.integrations.integration_utils import WandbLogModel

from trainer_kit.callback import CallbackList
from trainer_kit.callbacks import from_transformers
from trainer_kit.errors import CallbackError
from trainer_kit.run import Run


class Recorder(TrainerCallback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []

    def _keep(self, event: str, args: Any, state: Any, control: Any, kwargs: dict[str, Any]) -> None:
        self.calls.append((event, state.global_step, kwargs))
        self.args, self.state, self.control = args, state, control


for hook in [name for name in vars(TrainerCallback) if name.startswith("on_")]:

    def listen(self: Recorder, args: Any, state: Any, control: Any, *, _hook: str = hook, **kwargs: Any) -> None:
        self._keep(_hook, args, state, control, kwargs)

    setattr(Recorder, hook, listen)


def train(run: Run, events: CallbackList, take_step: Any, evaluations: Mapping[int, float], steps: int = 10) -> None:
    """Goes through a run as the loop does, with an evaluation of a loss after the steps in `evaluations`."""
    requests = run.requests
    events.call("on_init_end", run)
    events.call("on_train_begin", run)
    while run.state.step < steps and not requests.stop:
        if run.state.position == 0:
            events.call("on_epoch_begin", run)
        events.call("on_step_begin", run)
        events.call("on_substep_end", run)
        events.call("on_pre_optimizer_step", run)
        events.call("on_optimizer_step", run)
        take_step(run)
        events.call("on_step_end", run)
        if run.state.position == 0:
            events.call("on_epoch_end", run)
        if requests.log or run.state.step % 5 == 0:
            record = {"step": run.state.step, "epoch": run.state.epochs, "loss": 0.5, "learning_rate": 0.1}
            events.call("on_log", run, record)
        if requests.evaluate or run.state.step in evaluations:
            value = evaluations.get(run.state.step, 9.0)
            if run.state.best_metric is None or value < run.state.best_metric:
                run.state.best_metric, run.state.best_step = value, run.state.step
            events.call("on_evaluate", run, {"eval_loss": value})
        if requests.save:
            events.call("on_save", run, Path(f"checkpoint-{run.state.step}"))
        requests.log = requests.evaluate = requests.save = False
    events.call("on_train_end", run, None)


def test_all_hooks_and_what_they_are_given(make_run: Callable[..., Run], take_step: Any) -> None:
    run, callback = make_run(num_train_epochs=2), Recorder()
    run.processing_class, run.lr_scheduler = object(), object()
    events = CallbackList([from_transformers(callback)])
    train(run, events, take_step, {3: 0.5}, steps=3)
    events.call("on_predict", run, {"test_loss": 0.25})
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    assert [call[0] for call in callback.calls] == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *(step * 3),
        *("on_log", "on_evaluate", "on_train_end", "on_predict"),
    ]
    assert [call[1] for call in callback.calls if call[0] == "on_step_end"] == [1, 2, 3]
    for event, _, kwargs in callback.calls:
        assert kwargs["model"] is run.model
        assert kwargs["processing_class"] is run.processing_class
        assert (kwargs["optimizer"], kwargs["lr_scheduler"]) == (run.optimizer, run.lr_scheduler)
        assert kwargs["train_dataloader"] is None
        assert kwargs["eval_dataloader"] is None
        assert ("logs" in kwargs) == (event == "on_log")
        metrics = {"on_evaluate": {"eval_loss": 0.5, "epoch": 0.6}, "on_predict": {"test_loss": 0.25}}
        assert kwargs.get("metrics") == metrics.get(event)
    state = callback.state
    assert (state.max_steps, state.num_train_epochs, state.epoch, state.is_world_process_zero) == (10, 2, 0.6, True)
    assert (state.best_metric, state.best_global_step) == (0.5, 3)


def test_a_hook_that_is_not_overridden_costs_nothing() -> None:
    class Quiet(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    adapter = from_transformers(Quiet)
    listeners = CallbackList([adapter])._listeners
    assert [callback for callback, _, _ in listeners["on_step_end"]] == [adapter]
    for hook in ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "metrics"):
        assert listeners[hook] == []


@pytest.mark.parametrize(
    ("flag", "request_name"),
    [
        ("should_log", "log"),
        ("should_evaluate", "evaluate"),
        ("should_save", "save"),
        ("should_training_stop", "stop"),
    ],
)
def test_control_becomes_requests(make_run: Callable[..., Run], take_step: Any, flag: str, request_name: str) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 4:
                setattr(control, flag, True)
            return control

    run, recorder = make_run(), Recorder()
    train(run, CallbackList([from_transformers(Asks()), from_transformers(recorder)]), take_step, {})
    events = [(event, step) for event, step, _ in recorder.calls]
    if request_name == "stop":
        assert max(step for _, step in events) == 4
    else:
        assert (f"on_{request_name}", 4) in events
        assert max(step for _, step in events) == 10


def test_what_others_ask_for_is_seen_and_stays(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), Recorder()
    adapter = from_transformers(callback)
    run.requests.save = True
    adapter.on_step_end(run)
    assert callback.control.should_save
    assert run.requests.save
    run.requests.save = False
    adapter.on_step_end(run)
    assert not callback.control.should_save


def test_numbers_that_it_adds_are_kept(make_run: Callable[..., Run]) -> None:
    class Adds(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            logs |= {"perplexity": math.exp(logs["loss"]), "text": "none"}

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            metrics |= {"eval_loss": -1.0, "eval_double": metrics["eval_loss"] * 2}

    run, adapter = make_run(), from_transformers(Adds)
    record: dict[str, Any] = {"step": 3, "epoch": 0.6, "loss": 0.0}
    adapter.on_log(run, record)
    assert record == {"step": 3, "epoch": 0.6, "loss": 0.0, "perplexity": 1.0}
    metrics: dict[str, Any] = {"eval_loss": 0.5, "loss": 0.0}
    adapter.on_evaluate(run, metrics)
    assert metrics == {"eval_loss": 0.5, "loss": 0.0, "perplexity": 1.0, "eval_double": 1.0}


def test_leaving_an_epoch_is_refused(make_run: Callable[..., Run]) -> None:
    class Skips(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    with pytest.raises(CallbackError, match=r"callback Skips raised in on_step_end.*should_epoch_stop"):
        CallbackList([from_transformers(Skips())]).call("on_step_end", make_run())


EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("losses", "last_step"),
    [
        ([5, 4, 3, 2, 1, 0.9, 0.8, 0.7, 0.6, 0.5], 10),
        ([5, 4, 4, 4, 1, 1, 1, 1, 1, 1], 4),
        ([5, 6, 4, 6, 6, 1, 1, 1, 1, 1], 5),
    ],
)
def test_early_stopping_of_transformers(
    make_run: Callable[..., Run], take_step: Any, losses: list[float], last_step: int
) -> None:
    run = make_run(**EVALUATING)
    callback = EarlyStoppingCallback(early_stopping_patience=2)
    train(run, CallbackList([from_transformers(callback)]), take_step, dict(enumerate(losses, start=1)))
    assert run.state.step == last_step


def test_its_count_is_kept_over_a_resume(make_run: Callable[..., Run], take_step: Any) -> None:
    losses = dict(enumerate([5, 6, 7, 8, 9, 9, 9, 9, 9, 9], start=1))
    run = make_run(**EVALUATING)
    events = CallbackList([from_transformers(EarlyStoppingCallback(4))])
    train(run, events, take_step, losses, steps=3)
    resumed = make_run(**EVALUATING)
    resumed.state.load_state_dict(run.state.state_dict())
    again = CallbackList([from_transformers(EarlyStoppingCallback(4))])
    again.load_state_dict(events.state_dict())
    train(resumed, again, take_step, losses)
    assert resumed.state.step == 5


def test_the_printer_of_transformers(
    make_run: Callable[..., Run], take_step: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    train(run, CallbackList([from_transformers(PrinterCallback)]), take_step, {7: 0.25})
    assert capsys.readouterr().out.splitlines() == [
        "{'epoch': '1', 'loss': '0.5', 'learning_rate': '0.1'}",
        "{'eval_loss': '0.25', 'epoch': '1.4'}",
        "{'epoch': '2', 'loss': '0.5', 'learning_rate': '0.1'}",
    ]


def test_the_bar_of_transformers(
    make_run: Callable[..., Run], take_step: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_run(), CallbackList([from_transformers(ProgressCallback())]), take_step, {})
    captured = capsys.readouterr()
    assert "10/10" in captured.err
    assert "{'epoch': '1', 'loss': '0.5', 'learning_rate': '0.1'}" in captured.out


def test_the_log_history_is_complete_and_kept(make_run: Callable[..., Run], take_step: Any) -> None:
    run, callback = make_run(), Recorder()
    events = CallbackList([from_transformers(callback)])
    train(run, events, take_step, {7: 0.25})
    expected = [
        {"epoch": 1.0, "loss": 0.5, "learning_rate": 0.1, "step": 5},
        {"eval_loss": 0.25, "epoch": 1.4, "step": 7},
        {"epoch": 2.0, "loss": 0.5, "learning_rate": 0.1, "step": 10},
    ]
    assert callback.state.log_history == expected
    again = from_transformers(Recorder())
    again.load_state_dict(events.state_dict()["Recorder"])
    assert again.state_dict()["log_history"] == expected


def test_a_late_save_has_the_step_of_its_checkpoint(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), Recorder()
    run.state.step = 7
    adapter = from_transformers(callback)
    adapter.on_save(run, Path("checkpoint-5"))
    adapter.on_epoch_end(run)
    assert [(name, step) for name, step, _ in callback.calls] == [("on_save", 5), ("on_epoch_end", 7)]


def test_the_model_is_in_evaluation_mode_where_theirs_is(make_run: Callable[..., Run], tmp_path: Path) -> None:
    modes: dict[str, bool] = {}

    def look(hook: str) -> Any:
        return lambda self, args, state, control, model, **others: modes.update({hook: model.training})

    hooks = ("on_step_end", "on_log", "on_evaluate", "on_predict", "on_save", "on_train_end")
    kind: Any = type("Looks", (TrainerCallback,), {hook: look(hook) for hook in hooks})
    run, callback = make_run(), from_transformers(kind())
    run.model.train()
    callback.on_init_end(run)
    callback.on_train_begin(run)
    callback.on_step_end(run)
    callback.on_log(run, {"step": 1, "epoch": 0.5, "loss": 1.0})
    assert modes == {"on_step_end": True, "on_log": True}
    callback.on_evaluate(run, {"eval_loss": 1.0})
    callback.on_predict(run, {})
    callback.on_save(run, tmp_path / "checkpoint-1")
    callback.on_train_end(run, None)
    assert modes == dict.fromkeys(hooks, False) | {"on_step_end": True}
    assert run.model.training


def test_a_callback_that_needs_their_trainer_is_refused() -> None:
    callback = Recorder()
    callback._log_model = WandbLogModel.CHECKPOINT  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="Recorder with WANDB_LOG_MODEL makes a Trainer of transformers; give report_to"
    ):
        from_transformers(callback)


@pytest.mark.parametrize("what", [object(), dict, "EarlyStoppingCallback"])
def test_something_else_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="TrainerCallback"):
        from_transformers(what)

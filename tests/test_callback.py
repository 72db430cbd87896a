from __future__ import annotations

import inspect
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.models import Linear
from transformers import PrinterCallback

from trainer_kit import Trainer
from trainer_kit.callback import HOOKS, Callback, CallbackList
from trainer_kit.callbacks import Memory, Throughput
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.errors import CallbackError, LostProcessError
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(TrainingArguments(output_dir=str(tmp_path)), Strategy(), torch.nn.Linear(1, 1))


def listener(name: str, heard: list[str], hook: str = "on_step_end", priority: int = 0) -> Callback:
    """A callback of a class of its own that overrides one hook."""

    def listen(self: Callback, run: Run, *rest: Any) -> None:
        heard.append(name)

    made: Callback = type(name, (Callback,), {hook: listen, "priority": priority})()
    return made


def arguments_of(hook: str) -> tuple[Any, ...]:
    return (None,) * (len(inspect.signature(getattr(Callback, hook)).parameters) - 2)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_reaches_those_who_override_it_and_only_them(run: Run, hook: str) -> None:
    heard: list[str] = []
    events = CallbackList(
        [listener("Here", heard, hook), Callback(), *(listener(h, heard, h) for h in HOOKS if h != hook)]
    )
    if hook == "on_exception":
        events.call_exception(run, ValueError())
    else:
        events.call(hook, run, *arguments_of(hook))
    assert heard == ["Here"]


def test_idle_hooks_of_shipped_callbacks_are_left_out(run: Run) -> None:
    heard: list[str] = []
    callback = listener("Shipped", heard)
    type(callback).__module__ = "trainer_kit.callbacks.shipped"
    events = CallbackList([callback])
    entries = len(run.ledger._entries)
    callback._idle_hooks = ("on_step_begin", "on_step_end")
    events.call("on_step_end", run)
    assert (heard, len(run.ledger._entries)) == ([], entries)
    callback._idle_hooks = ("on_step_begin",)
    events.call("on_step_end", run)
    assert heard == ["Shipped"]


@pytest.mark.parametrize("base", [Memory, Throughput])
def test_a_hook_that_a_subclass_overrides_is_never_idle(tmp_path: Path, base: type[Callback]) -> None:
    heard: list[str] = []

    class Own(base):  # type: ignore[misc, valid-type]
        def on_pre_optimizer_step(self, run: Run) -> None:
            super().on_pre_optimizer_step(run)
            heard.append("before")

        def on_step_end(self, run: Run) -> None:
            super().on_step_end(run)
            heard.append("end")

    args = TrainingArguments(str(tmp_path), max_steps=4, use_cpu=True, report_to="none", save_strategy="no")
    Trainer(Linear(), args, [{"x": torch.ones(4), "labels": torch.tensor(0)}] * 32, callbacks=[Own()]).train()
    assert heard == ["before", "end"] * 4


def test_every_hook_of_the_base_can_be_called(run: Run) -> None:
    for hook in HOOKS:
        assert getattr(Callback(), hook)(run, *arguments_of(hook)) is None
    assert Callback().metrics(run) == {}
    assert Callback().state_dict() == {}
    Callback().load_state_dict({})


def test_an_unused_hook_costs_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    events = CallbackList([listener("Other", [], "on_log"), Callback()])
    monkeypatch.setattr(Callback, "on_step_end", lambda self, run: called.append("base"))
    events.call("on_step_end", run)
    assert called == []


def test_a_hook_set_on_the_instance_is_heard_too(run: Run) -> None:
    callback, heard = Callback(), []
    callback.on_step_end = lambda run: heard.append(run)  # type: ignore[method-assign]
    CallbackList([callback]).call("on_step_end", run)
    assert heard == [run]


def test_order_is_by_priority_then_as_given(run: Run) -> None:
    heard: list[str] = []
    given = [("a", 5), ("b", 0), ("c", -1), ("d", 0), ("e", 5)]
    CallbackList([listener(name, heard, priority=priority) for name, priority in given]).call("on_step_end", run)
    assert "".join(heard) == "cbdae"


class Raising(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, run: Run) -> None:
        raise self.error

    def metrics(self, run: Run) -> dict[str, Any]:
        raise self.error

    def on_exception(self, run: Run, error: BaseException) -> None:
        raise self.error


def test_one_that_raises_is_named_with_the_hook(run: Run) -> None:
    error, heard = KeyError("x"), list[str]()
    events = CallbackList([Raising(error), listener("After", heard)])
    with pytest.raises(CallbackError, match="callback Raising raised in on_step_end: KeyError: 'x'") as caught:
        events.call("on_step_end", run)
    assert caught.value.__cause__ is error
    assert heard == []
    with pytest.raises(CallbackError, match="callback Raising raised in metrics: KeyError") as caught:
        events.metrics(run)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_leaving_is_no_error_of_the_callback(run: Run, error: BaseException) -> None:
    with pytest.raises(type(error)):
        CallbackList([Raising(error)]).call("on_step_end", run)


def test_all_are_told_of_an_exception_though_one_raises(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    events = CallbackList([Raising(ValueError("second")), listener("After", heard, "on_exception")])
    events.call_exception(run, KeyError("first"))
    assert heard == ["After"]
    assert "callback Raising raised in on_exception: ValueError: second" in caplog.text


def test_numbers_are_merged_in_order(run: Run) -> None:
    class One(Callback):
        def metrics(self, run: Run) -> dict[str, Any]:
            return {"a": 1, "b": 1}

    class Two(Callback):
        def metrics(self, run: Run) -> dict[str, Any]:
            return {"b": 2}

    assert CallbackList([One(), Callback(), Two()]).metrics(run) == {"a": 1, "b": 2}


class Counter(Callback):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Other(Counter):
    pass


def test_states_come_back_by_class_and_number() -> None:
    saved = CallbackList([Counter(1), Other(2), Counter(3), Callback(), Counter()]).state_dict()
    assert saved == {"Counter": {"count": 1}, "Other": {"count": 2}, "Counter#2": {"count": 3}}
    callbacks = [Other(), Counter(), Counter(), Counter(9)]
    CallbackList(callbacks).load_state_dict(saved)
    assert [callback.count for callback in callbacks] == [2, 1, 3, 9]


def test_a_state_whose_callback_is_gone_is_told_of() -> None:
    callback = Other()
    with pytest.warns(UserWarning, match="state of callback Counter, which this run does not have"):
        CallbackList([callback]).load_state_dict({"Counter": {"count": 1}, "Other": {"count": 2}})
    assert callback.count == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([Counter], r"callbacks holds the class Counter; give an instance, Counter\(\.\.\.\)"),
        (["EMA"], "callbacks holds 'EMA', which is no trainer_kit Callback$"),
        (Counter(), r"is no list of callbacks; give callbacks=\[Counter\(\.\.\.\)\]"),
        (Counter, r"is no list of callbacks; give callbacks=\[Counter\(\.\.\.\)\]"),
        (None, r"callbacks=None is no list of callbacks"),
        ([PrinterCallback()], r"give trainer_kit\.callbacks\.from_transformers\(PrinterCallback\)"),
    ],
)
def test_callbacks_are_a_list_of_instances(given: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        Trainer(torch.nn.Linear(1, 1), callbacks=given)


class Gives(Callback):
    """Adds its values wherever a callback may."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def metrics(self, run: Run) -> dict[str, Any]:
        return dict(self.values)

    summary = metrics

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        record.update(self.values)

    on_evaluate = on_predict = on_log


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor([2.5], requires_grad=True).sum(), 2.5),
        (torch.tensor([[3]]), 3),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(2**60 + 1), 2**60 + 1),
        (np.bool_(False), False),
        (np.array([1.5]), 1.5),
        (Fraction(1, 4), 0.25),
        (-3, -3),
    ],
)
def test_what_callbacks_give_is_plain_numbers_for_all(run: Run, value: Any, plain: float) -> None:
    events = CallbackList([Gives(mine=value)])
    found: list[Any] = [events.metrics(run)["mine"], events.summary(run)["mine"]]
    for hook in ("on_log", "on_evaluate", "on_predict"):
        values: dict[str, Any] = {"step": 1}
        events.call(hook, run, values)
        found.append(values["mine"])
    assert [(type(each), each) for each in found] == [(type(plain), plain)] * 5


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(3), "warm", None, [1.0], 1j, torch.tensor(1j), object()])
@pytest.mark.parametrize("hook", ["metrics", "on_evaluate"])
def test_what_is_no_number_is_refused_by_name(run: Run, value: Any, hook: str) -> None:
    events = CallbackList([Gives(fine=1, mine=value)])
    with pytest.raises(
        CallbackError, match=rf"callback Gives raised in {hook}: TypeError: 'mine' is .*; give a number"
    ):
        events.metrics(run) if hook == "metrics" else events.call(hook, run, {})


def test_what_compute_metrics_gave_stays_as_it_is(run: Run) -> None:
    matrix, metrics = np.ones((2, 2)), {"eval_loss": 1.0}
    metrics["eval_matrix"] = matrix  # type: ignore[assignment]
    CallbackList([Gives(mine=torch.tensor(2.0))]).call("on_evaluate", run, metrics)
    assert metrics["eval_matrix"] is matrix
    assert metrics["mine"] == 2.0


def test_numbers_on_the_device_are_read_in_one_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, whose tensors hold nothing: reading one by one would raise."""
    reads: list[int] = []

    def read(scalars: Any, summed: bool = False) -> list[float]:
        reads.append(len(scalars))
        return [float(number) for number in range(len(scalars))]

    monkeypatch.setattr(run.strategy.collectives, "read_scalars", read)
    on_device = torch.empty((), device="meta")
    events = CallbackList(
        [Gives(a=on_device, b=1), Gives(c=torch.empty(1, 1, device="meta")), Gives(d=torch.tensor(7.0))]
    )
    assert events.metrics(run) == {"a": 0.0, "b": 1, "c": 1.0, "d": 7.0}
    assert reads == [2]


class Broken(Callback):
    is_reporter = True

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def metrics(self, run: Run) -> dict[str, Any]:
        raise OSError(28, "No space left on device")


def test_what_only_reports_ends_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    records: list[str] = []
    events = CallbackList([Broken(), listener("After", records, "on_log")])
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        for _ in range(3):
            events.call("on_log", run, {})
            events.metrics(run)
    assert len(records) == 3
    (sentence,) = caplog.messages
    assert sentence == (
        "callback Broken raised in on_log: BrokenPipeError: [Errno 32] Broken pipe; training continues without what it "
        "reports"
    )
    events.call("on_train_begin", run)
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        events.call("on_log", run, {})
    assert caplog.messages == [sentence, sentence]


def test_only_its_own_callback_is_blamed_for_what_is_no_number(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Callback):
        is_reporter = True

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            record.update(text="fine", half=torch.tensor(0.5))

    records: list[str] = []
    record = {"loss": 1.0, "event": "kept"}
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        CallbackList([Wrong(), listener("After", records, "on_log")]).call("on_log", run, record)
    (sentence,) = caplog.messages
    assert sentence.startswith("callback Wrong raised in on_log: TypeError: 'text' is 'fine', a str; ")
    assert (len(records), record) == (1, {"loss": 1.0, "event": "kept"})


def test_a_hook_of_other_parameters_is_refused_before_training() -> None:
    class Old(Callback):
        def on_train_end(self, run: Run) -> None: ...  # type: ignore[override]

    with pytest.raises(TypeError) as caught:
        CallbackList([Old()])
    assert str(caught.value) == (
        "callback Old cannot be called in on_train_end: too many positional arguments; define "
        "on_train_end(self, run, metrics)"
    )


@pytest.mark.parametrize("name", ["metrics", "summary", "on_log"])
def test_an_attribute_in_the_place_of_a_method_is_refused(name: str) -> None:
    callback = Callback()
    setattr(callback, name, {})
    with pytest.raises(TypeError, match=rf"callback Callback has the attribute {name}={{}}, which takes the place of"):
        CallbackList([callback])


def test_a_hook_may_take_its_parameters_as_it_likes() -> None:
    class Loose(Callback):
        def on_log(self, *given: Any) -> None: ...

        def on_train_end(self, run: Run, metrics: Any = None, more: int = 0) -> None: ...

    CallbackList([Loose()])


def test_a_lost_process_is_no_fault_of_the_callback_that_waited_for_it(run: Run) -> None:
    class Waits(Callback):
        def metrics(self, run: Run) -> dict[str, Any]:
            raise LostProcessError("rank 1 has ended")

    with pytest.raises(LostProcessError, match="rank 1 has ended"):
        CallbackList([Waits()]).metrics(run)

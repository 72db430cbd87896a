from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit import SingleDevice, Trainer, TrainingArguments
from trainer_kit.callback import Callback
from trainer_kit.callbacks import Compilation, read_log
from trainer_kit.run import Run
from trainer_kit.strategies.device_info import DeviceInfo


class Compiler(SingleDevice):
    """Compiles each shape that is new to it, and whatever else a test wants, in 2 seconds each."""

    static_shapes = True

    def __init__(self) -> None:
        super().__init__("cpu")
        self.others = 0
        self.device_info = CompilerInfo(self)


class CompilerInfo(DeviceInfo):
    """The number and the time of what a `Compiler` has compiled."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__(compiler.device)
        self.compiler = compiler

    def compilations(self) -> tuple[int, float]:
        count = len(self.compiler.shapes) + self.compiler.others
        return count, 2.0 * count


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).mean((1, 2)) - y).square().mean()}


class At(Callback):
    """Calls a function within a step: at the beginning of those that `steps` names."""

    priority = 50

    def __init__(self, function: Callable[[Run], None], *steps: int) -> None:
        self.function, self.steps = function, steps

    def on_substep_end(self, run: Run) -> None:
        self.on_pre_optimizer_step(run)

    def on_pre_optimizer_step(self, run: Run) -> None:
        if run.state.step + 1 in self.steps:
            self.function(run)


def compile_one(run: Run) -> None:
    assert isinstance(run.strategy, Compiler)
    run.strategy.others += 1


def feed(length: int) -> Callable[[Run], None]:
    """Feeds a batch of another length, as a collator would make it."""

    def function(run: Run) -> None:
        run.strategy.to_device({"x": torch.zeros(8, length, 4), "y": torch.zeros(8)})

    return function


def feed_new(run: Run) -> None:
    feed(100 + run.state.step)(run)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[str]]:
    """Trains 4 epochs of 4 steps; returns the warnings."""

    def train(*callbacks: Callback, resume: bool = False, samples: int = 32, **arguments: Any) -> list[str]:
        data = [{"x": torch.ones(3, 4), "y": torch.tensor(0.0)} for _ in range(samples)]
        arguments = {"num_train_epochs": 4, "logging_steps": 5, "save_strategy": "no", **arguments}
        args = TrainingArguments(output_dir=str(tmp_path), **arguments)
        evaluated = {"one": data[:8], "other": data[:16]} if args.eval_strategy != "no" else None
        trainer = Trainer(Net(), args, data, evaluated, callbacks=callbacks, strategy=Compiler())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", DeprecationWarning)  # an older matplotlib with a newer pyparsing
            trainer.train(resume)
        return [str(each.message) for each in caught]

    return train


Train = Callable[..., list[str]]


def test_records_count_what_was_compiled(train: Train, tmp_path: Path) -> None:
    assert train(At(compile_one, 2), At(feed(5), 4)) == []
    records = [each for each in read_log(tmp_path / "log.jsonl") if "loss" in each]
    assert [each["xla/compiles"] for each in records] == [3, 3, 3, 3]
    assert [each["xla/compile_seconds"] for each in records] == [6.0, 6.0, 6.0, 6.0]


def test_a_strategy_that_compiles_nothing_adds_nothing(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), Compilation()
    callback.on_train_begin(run)
    callback.on_step_begin(run)
    callback.on_step_end(run)
    assert callback.metrics(run) == {}


def test_a_recompile_after_the_first_epoch_is_warned_of_once(train: Train) -> None:
    (message,) = train(At(feed(6), 4), At(feed(5), 9), At(feed(7), 10), At(compile_one, 11))
    assert message == (
        "step 9 compiled again (2 s) after the warm-up: a new shape came, x is [8, 5, 4] instead of [8, 3, 4]. To "
        "change it, pad to few sizes, with a tokenizer by pad_to_lengths=[32] or pad_to_multiple_of=32, else in the "
        "data_collator. This is said once; records count what is compiled."
    )


def test_without_a_new_shape_the_computation_changed(train: Train) -> None:
    (message,) = train(At(compile_one, 5))
    assert "step 5 compiled again (2 s) after the warm-up: no shape was new" in message
    assert ".item()" in message
    assert "accumulation" not in message


def test_with_accumulation_a_place_in_the_step_may_be_new(train: Train) -> None:
    (message,) = train(At(compile_one, 9), gradient_accumulation_steps=2, num_train_epochs=6)
    assert "at another place in the step's accumulation" in message


def test_the_first_steps_may_compile_where_epochs_are_short(train: Train) -> None:
    short = {"samples": 8, "num_train_epochs": 10}
    assert train(At(compile_one, 1, 2, 3), **short) == []
    (message,) = train(At(compile_one, 4), **short)
    assert message.startswith("step 4 ")


def test_in_a_long_epoch_so_many_steps_may_compile(train: Train) -> None:
    long = {"samples": 8 * 20, "num_train_epochs": 1}
    assert train(At(feed_new, *range(2, 11)), **long) == []  # with the first step 10
    (message,) = train(At(feed_new, *range(2, 20)), **long)
    assert message.startswith("step 11 compiled again")
    assert "pad_to_lengths=[32, 128]" in message


def test_each_evaluation_may_compile_the_first_time(train: Train) -> None:
    class Evaluations(Callback):
        def __init__(self) -> None:
            self.seen = 0

        def on_evaluate_begin(self, run: Run) -> None:
            self.seen += 1

        def on_evaluate_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
            if self.seen in compiling:
                with torch.no_grad():
                    feed(20 + self.seen)(run)

    class Early(Evaluations):
        priority = -1  # before Compilation looks

    compiling = {1, 2}
    assert train(Early(), eval_strategy="epoch") == []
    compiling = {6}
    (message,) = train(Early(), eval_strategy="epoch")
    assert message.startswith("the evaluation at step 12 compiled again (2 s)")
    assert "x is [8, 26, 4] instead of [8, 3, 4]" in message


def test_what_is_compiled_between_steps_is_no_step_s(train: Train) -> None:
    class OnLog(Callback):
        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            compile_one(run)

    assert train(OnLog()) == []


@pytest.mark.slow
def test_after_a_resume_everything_is_compiled_anew(train: Train) -> None:
    class Stop(Callback):
        def on_step_end(self, run: Run) -> None:
            run.requests.stop = run.state.step == 7  # in the second epoch

    saved = {"save_strategy": "steps", "save_steps": 7}
    assert train(Stop(), **saved) == []
    # The first epoch that is whole ends with step 12.
    (message,) = train(At(feed(5), 12), At(feed(6), 13), resume=True, **saved)
    assert message.startswith("step 13 ")


def test_only_the_main_process_warns(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, callback = make_run(rank=1), Compilation()
    compiled = iter(range(100))
    monkeypatch.setattr(run.strategy.device_info, "compilations", lambda: (next(compiled), 0.0))
    callback.on_train_begin(run)
    run.state.step, run.state.epoch = 50, 5
    callback.on_step_begin(run)
    callback.on_step_end(run)  # warnings are errors in tests


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_the_first_compilation_may_come_late(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none again. The hook at the beginning of a step is called from then on."""
    run, callback, count = make_run(), Compilation(), [0]
    monkeypatch.setattr(run.strategy.device_info, "compilations", lambda: (count[0], 0.0))
    callback.on_train_begin(run)
    assert callback._idle_hooks == ("on_step_begin",)
    run.state.step, run.state.epoch, count[0] = 500, 3, 1
    callback.on_step_end(run)
    assert callback._idle_hooks == ()
    callback.on_step_begin(run)
    count[0] = 2
    with pytest.warns(UserWarning, match="step 500 compiled again"):
        callback.on_step_end(run)
    callback.on_train_begin(run)
    assert callback._idle_hooks == ()


@pytest.mark.usefixtures("fresh_compiler")
def test_what_torch_compile_makes_is_counted(make_run: Callable[..., Run]) -> None:
    class Model(nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * self.factor

    model = Model()
    model.compile(backend="eager", dynamic=False)
    run, callback = make_run(), Compilation()
    callback.on_train_begin(run)

    def step(rows: int) -> int:
        callback.on_step_begin(run)
        model(run.strategy.to_device(torch.ones(rows, 4)))
        run.state.step += 1
        callback.on_step_end(run)
        return int(callback.metrics(run)["compile/compiles"])

    assert [step(8), step(8), step(6), step(8)] == [1, 1, 2, 2]
    assert 0 < callback.metrics(run)["compile/compile_seconds"] < 600
    run.state.epoch, model.factor = 1, 2.0
    with pytest.warns(UserWarning, match=r"step 5 compiled again .* Python value .* TORCH_LOGS=recompiles"):
        assert step(8) == 3


@pytest.mark.slow
def test_counting_imports_no_compiler() -> None:
    code = (
        "import sys; from trainer_kit.strategies.base import Strategy; print(Strategy().device_info.compilations());"
        "print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["(0, 0.0)", "[]"]

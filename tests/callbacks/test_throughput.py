from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import Callback, Trainer, TrainingArguments
from trainer_kit.callbacks import Throughput, throughput
from trainer_kit.profiling.flops import FlopCounter
from trainer_kit.profiling.peak_flops import Peak
from trainer_kit.profiling.time_ledger import Ledger
from trainer_kit.run import Run


class Times(Ledger):
    """A ledger whose times a test writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = {"setup": 3.0}

    def seconds(self) -> dict[str, float]:
        return dict(self.spent)

    def spend(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.spent[name] = self.spent.get(name, 0.0) + value


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def make(make_run: Callable[..., Run], times: Times, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(throughput, "peak_of", lambda device, dtype: Peak(1e6, "a test"))

    def make(**arguments: Any) -> Run:
        run = make_run(**arguments)
        run.ledger = times
        return run

    return make


@pytest.fixture
def callback() -> Iterator[Throughput]:
    """Leaves no counter behind for other tests."""
    callback = Throughput()
    yield callback
    callback._operations.stop()
    assert modes() == 0


@pytest.fixture
def step(times: Times, take_step: Callable[[Run], None]) -> Callable[[Run, Throughput], None]:
    def step(run: Run, callback: Throughput, size: int = 10, slower: float = 0.0) -> None:
        """2 seconds, half of one of them waiting for data; a linear layer on ten rows of 4."""
        times.spend(data=0.5)
        callback.on_step_begin(run)
        run.batch = run.strategy.to_device({"x": torch.ones(size, 4)})
        times.enter("forward")
        run.model(run.batch["x"]).sum().backward()
        times.spend(forward=0.5 + slower, backward=0.5, optimizer=0.25, loop=0.25)
        take_step(run)
        callback.on_step_end(run)

    return step


Step = Callable[..., None]
RATES = ("samples_per_second", "steps_per_second", "data_wait", "tokens_per_second")
ONE = 2 * 10 * 4 * 2 * 2  # forward, and the weights' gradient: the input needs none


def rates(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name in RATES}


def test_rates_since_the_last_record(make: Callable[..., Run], times: Times, step: Step, callback: Throughput) -> None:
    run = make()
    run.state.step, run.state.samples = 5, 50  # resumed
    times.spend(data=7.0)
    callback.on_train_begin(run)
    for _ in range(3):
        step(run, callback)  # the first one is counted, and left out
    assert callback.metrics(run)["steps_per_second"] == pytest.approx(2 / (2 * 2 + 0.5))
    step(run, callback)
    step(run, callback)
    expected = {"samples_per_second": 5.0, "steps_per_second": 0.5, "data_wait": 0.25}
    assert rates(callback.metrics(run)) == pytest.approx(expected)
    times.spend(loop=2)  # the next step is slower
    step(run, callback)
    run.state.tokens += 400
    assert rates(callback.metrics(run)) == pytest.approx(
        {"samples_per_second": 2.5, "steps_per_second": 0.25, "data_wait": 0.125, "tokens_per_second": 100.0}
    )


def test_a_record_after_a_counted_step_alone_has_rates_too(
    make: Callable[..., Run], step: Step, callback: Throughput
) -> None:
    run = make()
    callback.on_train_begin(run)
    step(run, callback)
    figures = callback.metrics(run)
    assert figures["samples_per_second"] == 5.0
    assert figures["model_flops_per_second"] == ONE / 2


def test_the_time_of_a_counted_step_is_left_out(
    make: Callable[..., Run], times: Times, step: Step, callback: Throughput
) -> None:
    run = make()
    callback.on_train_begin(run)
    step(run, callback, slower=5)
    for _ in range(4):
        step(run, callback, 20)  # a shape that is counted after the record
    # Without the step that took 7 seconds; half a second of it, for data, was before it.
    assert callback.metrics(run)["samples_per_second"] == pytest.approx(4 * 10 / (4 * 2 + 0.5))
    step(run, callback, 20, slower=5)
    for _ in range(4):
        step(run, callback, 20)
    assert callback.metrics(run)["samples_per_second"] == pytest.approx(4 * 10 / (4 * 2 + 0.5))


def test_evaluating_and_saving_do_not_count(
    make: Callable[..., Run], times: Times, step: Step, callback: Throughput
) -> None:
    run = make()
    callback.on_train_begin(run)
    step(run, callback)
    callback.metrics(run)
    times.spend(evaluation=30, saving=20, lost=5, down=7, setup=1)
    times.spend(**{"callback/Throughput": 0.2})  # a CPU's peak
    step(run, callback)
    figures = callback.metrics(run)
    assert figures["steps_per_second"] == pytest.approx(0.5)
    assert figures["seconds/evaluation"] == 30
    times.spend(**{"callback/Slow": 2})  # where other callbacks take their time, training takes it
    step(run, callback)
    assert callback.metrics(run)["steps_per_second"] == pytest.approx(0.25)


def test_where_the_time_goes(make: Callable[..., Run], times: Times, step: Step, callback: Throughput) -> None:
    run = make()
    times.spend(**{"callback/Old": 5})
    callback.on_train_begin(run)
    step(run, callback)
    times.spend(evaluation=3)
    figures = callback.metrics(run)
    assert {name: value for name, value in figures.items() if name.startswith("seconds/")} == {
        "seconds/data": 0.5, "seconds/forward": 0.5, "seconds/backward": 0.5, "seconds/optimizer": 0.25,
        "seconds/loop": 0.25, "seconds/evaluation": 3.0,
    }  # fmt: skip
    assert figures["goodput"] == pytest.approx(1.25 / 5)
    summary = callback.summary(run)
    assert summary["seconds/setup"] == 3
    assert summary["seconds/callback/Old"] == 5
    assert summary["wall_seconds"] == 13
    assert summary["goodput"] == pytest.approx(1.25 / 13)


def test_operations_and_what_the_device_could_do(make: Callable[..., Run], step: Step, callback: Throughput) -> None:
    run = make(model=torch.nn.Linear(4, 2000))
    callback.on_train_begin(run)
    one = ONE * 1000
    for _ in range(3):
        step(run, callback)
    callback.metrics(run)
    step(run, callback)
    step(run, callback)
    figures = callback.metrics(run)
    assert figures["model_flops_per_second"] == pytest.approx(one / 2)
    assert figures["hardware_flops_per_second"] == figures["model_flops_per_second"]
    assert figures["mfu"] == pytest.approx(one / 2 / 1e6)
    assert callback.summary(run)["mfu"] == pytest.approx(4 * one / (4 * 2 + 0.5) / 1e6)  # data of the counted step


def test_all_processes_add_up(
    make: Callable[..., Run], step: Step, monkeypatch: pytest.MonkeyPatch, callback: Throughput
) -> None:
    run = make(model=torch.nn.Linear(4, 2000))
    monkeypatch.setattr(run.strategy.collectives, "all_reduce_ints", lambda numbers: [3 * each for each in numbers])
    run.strategy.collectives.world_size = 3
    callback.on_train_begin(run)
    for _ in range(2):
        step(run, callback)
        figures = callback.metrics(run)
    assert figures["model_flops_per_second"] == pytest.approx(3 * ONE * 1000 / 2)
    assert figures["mfu"] == pytest.approx(ONE * 1000 / 2 / 1e6)  # of each
    many, all_of_them = 2**62 + 12345, 3 * (2**62 + 12345)
    assert callback._flops(run, many, many) == (pytest.approx(all_of_them), pytest.approx(all_of_them))


def test_no_figure_where_another_process_has_none(
    make: Callable[..., Run], step: Step, monkeypatch: pytest.MonkeyPatch, callback: Throughput
) -> None:
    def all_reduce_ints(numbers: Sequence[int]) -> Sequence[int]:
        return [*numbers[:-1], 1]

    run = make(model=torch.nn.Linear(4, 2000))
    monkeypatch.setattr(run.strategy.collectives, "all_reduce_ints", all_reduce_ints)
    callback.on_train_begin(run)
    step(run, callback)
    assert "mfu" not in callback.metrics(run)


def test_an_unknown_device_is_said_once(
    make: Callable[..., Run],
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    callback: Throughput,
) -> None:
    def unknown(device: Any, dtype: Any) -> Peak:
        raise LookupError("the table has no such device")

    monkeypatch.setattr(throughput, "peak_of", unknown)
    run = make(model=torch.nn.Linear(4, 2000))
    callback.on_train_begin(run)
    with caplog.at_level(logging.INFO, logger="trainer_kit"):
        for _ in range(3):
            step(run, callback)
            figures = callback.metrics(run)
    assert "mfu" not in figures
    assert figures["model_flops_per_second"] > 0
    assert caplog.messages == ["MFU is left out: the table has no such device"]


def test_static_shapes_are_not_counted(
    make: Callable[..., Run], step: Step, caplog: pytest.LogCaptureFixture, callback: Throughput
) -> None:
    run = make()
    run.strategy.static_shapes = True
    callback.on_train_begin(run)
    with caplog.at_level(logging.INFO, logger="trainer_kit"):
        step(run, callback)
        assert rates(callback.metrics(run)).keys() == {"samples_per_second", "steps_per_second", "data_wait"}
    assert caplog.messages[0].startswith("FLOP/s are left out: steps are recorded")


def test_going_back_begins_a_new_measure(
    make: Callable[..., Run], times: Times, step: Step, callback: Throughput
) -> None:
    run = make()
    callback.on_train_begin(run)
    for _ in range(3):
        step(run, callback)
    run.state.step, run.state.samples = 1, 10
    times.spent = {"setup": 3.0, "forward": 0.5, "lost": 5.5}
    callback.on_rollback(run, Path())
    step(run, callback)
    figures = callback.metrics(run)
    assert figures["steps_per_second"] == pytest.approx(0.5)
    assert "seconds/lost" not in figures


@pytest.mark.parametrize("has_given", [False, True], ids=["lost before its metrics", "lost after them"])
def test_after_a_regroup_all_processes_give_their_metrics_in_the_same_steps(
    make: Callable[..., Run],
    times: Times,
    step: Step,
    monkeypatch: pytest.MonkeyPatch,
    callback: Throughput,
    has_given: bool,
) -> None:
    """They sum their operations, so that one that did it alone would wait, or read what others mean otherwise."""
    run, asked = make(), list[Any]()
    monkeypatch.setattr(run.strategy.collectives, "all_reduce_ints", lambda numbers: asked.append(numbers) or numbers)
    callback.on_train_begin(run)
    for _ in range(2):
        step(run, callback)
    if has_given:
        callback.metrics(run)
    asked.clear()
    times.spend(regroup=3.0)
    callback.on_regroup(run)
    assert callback.metrics(run) == {}
    assert not asked
    step(run, callback)
    figures = callback.metrics(run)
    assert len(asked) == 1
    assert figures["steps_per_second"] == pytest.approx(0.5)
    assert figures["seconds/regroup"] == pytest.approx(3.0)


def test_the_first_record_of_a_process_that_has_joined_has_no_time_from_before(
    make: Callable[..., Run], times: Times, step: Step, callback: Throughput
) -> None:
    run = make()
    callback.on_train_begin(run)
    times.spent, times.has_joined = {"setup": 9.0, "forward": 500.0, "regroup": 1.0}, True
    callback.on_regroup(run)
    step(run, callback)
    times.spend(regroup=3.0)
    callback.on_regroup(run)  # a second one is in this record
    step(run, callback)
    figures = callback.metrics(run)
    assert figures["seconds/forward"] == pytest.approx(1.0)
    assert figures["seconds/regroup"] == pytest.approx(3.0)
    assert "seconds/setup" not in figures


def test_no_step_no_rates(make: Callable[..., Run], callback: Throughput) -> None:
    run = make()
    assert callback.metrics(run) == {}
    callback.on_train_begin(run)
    assert callback.metrics(run) == {}


def modes() -> int:
    return torch._C._len_torch_dispatch_stack()


def test_no_counter_is_left_behind(make: Callable[..., Run], step: Step, callback: Throughput) -> None:
    run = make()
    callback.on_train_begin(run)
    step(run, callback)
    assert modes() == 0
    for end in (lambda: callback.on_exception(run, ValueError()), lambda: callback.on_train_begin(run)):
        callback.on_train_begin(run)
        callback.on_step_begin(run)
        assert modes() == 1
        end()
        assert modes() == 0


def test_a_step_that_is_taken_again_is_counted_once(
    make: Callable[..., Run], times: Times, step: Step, callback: Throughput
) -> None:
    run = make(model=torch.nn.Linear(4, 2000))
    callback.on_train_begin(run)
    callback.on_step_begin(run)
    run.strategy.to_device({"x": torch.ones(20, 4)})
    times.enter("forward")
    run.model(torch.ones(20, 4))  # out of memory
    times.enter("loop")
    for _ in range(2):
        step(run, callback)
    callback.metrics(run)
    step(run, callback)
    assert callback.metrics(run)["model_flops_per_second"] == pytest.approx(ONE * 1000 / 2)


class Texts(torch.nn.Module):
    """An embedding and a layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.layer = torch.nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.dropout(self.embedding(input_ids), 0.2, self.training)
        return {"loss": torch.nn.functional.cross_entropy(self.layer(hidden).flatten(0, 1), labels.flatten())}


class Records(Callback):
    priority = 1000

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.records.append(record)


def train(folder: Path, model: torch.nn.Module, callbacks: list[Callback], **changes: Any) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 2, "logging_steps": 4, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "log_level": "error",
    }  # fmt: skip
    rows = [torch.arange(3 + index % 5) % 11 for index in range(32)]
    dataset = [{"input_ids": row, "labels": row} for row in rows]

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence([sample["labels"] for sample in samples], True, 0)
        return {"input_ids": padded, "labels": padded}

    trainer = Trainer(
        model, TrainingArguments(**(values | changes)), dataset, callbacks=callbacks, data_collator=collate
    )
    trainer.train()
    return trainer


def test_counting_changes_no_bits_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for counts in (True, False):
        if not counts:
            monkeypatch.setattr(Throughput, "on_step_begin", lambda self, run: None)
        torch.manual_seed(0)
        model, records = Texts(), Records()
        train(tmp_path / str(counts), model, [records])
        assert any("mfu" in record for record in records.records) is counts
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_operations_of_a_training_with_batches_of_many_shapes(tmp_path: Path) -> None:
    """What is counted now and then, against a counter around each step."""

    class Everything(Callback):
        def __init__(self) -> None:
            self.ledger = Ledger()
            self.counter = FlopCounter(lambda: self.ledger.activity in ("forward", "backward"))

        def on_step_begin(self, run: Run) -> None:
            self.ledger = run.ledger
            self.counter.__enter__()

        def on_optimizer_step(self, run: Run) -> None:
            self.counter.__exit__(None, None, None)

    everything = Everything()
    trainer = train(tmp_path, Texts(), [everything])
    (callback,) = (each for each in trainer.events.callbacks if isinstance(each, Throughput))
    assert callback._operations.so_far(trainer.run) == everything.counter.flops


@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [({}, True), ({"mixed_precision": "bf16"}, False), ({"float32_matmul_precision": "highest"}, False)],
)
def test_tf32_is_suggested_where_it_would_help(
    make: Callable[..., Run],
    callback: Throughput,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    is_said: bool,
) -> None:
    run = make(**arguments)
    monkeypatch.setattr(run.strategy, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with caplog.at_level(logging.INFO, "trainer_kit"):
        callback.on_train_begin(run)
    found = [text for text in caplog.messages if "TF32" in text]
    assert len(found) == is_said
    if is_said:
        assert "float32_matmul_precision='high' (TF32) allows 156" in found[0]

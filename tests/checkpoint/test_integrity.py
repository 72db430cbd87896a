"""Sealed checkpoints that hold what no run can have: skipped for an older one with the reason, never trained on."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scenarios.task import Noisy, StopAt, Stream, digest, make_trainer

from trainer_kit import Callback, Run, Trainer
from trainer_kit.callback import CallbackList
from trainer_kit.callbacks import EarlyStopping, from_transformers
from trainer_kit.checkpoint import CheckpointError, Committed, Manifest
from trainer_kit.checkpoint.async_saver import AsyncSaver
from trainer_kit.checkpoint.format.json_files import checksum
from trainer_kit.checkpoint.format.manifest import FileEntry
from trainer_kit.checkpoint.format.trainer_state import CheckedFile, _check_committed

TRAINER = "state/trainer.json"
INFINITE = "1e999"
RAW = "<raw 1e999>"
NAN = {"__kind__": "float", "value": "nan"}
INF = {"__kind__": "float", "value": "inf"}
NONSENSE: list[Any] = [-1, -(10**9), 10**6, 10**9, 2**70, -0.5, RAW, NAN, INF, None, "", "x", [], {}, [-1], {"x": -1}]

OTHERS = ("was made with", "does not take", "holds nothing for", "parameters in the same order")


def train(folder: Path, *callbacks: Any, **changes: Any) -> Trainer:
    made = {"max_steps": 6, "num_train_epochs": 1, "save_steps": 2, "warmup_steps": 2}
    trainer = make_trainer(folder, EarlyStopping(9), *callbacks, **(made | changes))
    trainer.train(resume_from_checkpoint=True)
    return trainer


def bits(trainer: Trainer) -> str:
    """Of model, optimizer and averages; logged losses are left out."""
    model, optimizer = trainer.run.model, trainer.run.optimizer
    assert optimizer is not None
    return repr(ordered([model.state_dict(), optimizer.state_dict(), trainer.events.state_dict()["EMA"]]))


def ordered(tree: Any) -> Any:
    """The same with tensors as bytes and the keys of dicts in order: those that a checkpoint lacks come last."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.detach().numpy().tobytes()
    if isinstance(tree, dict):
        return [(key, ordered(tree[key])) for key in sorted(tree, key=str)]
    return [ordered(each) for each in tree] if isinstance(tree, (list, tuple)) else tree


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped at step 4 of 6, with checkpoints of the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder, StopAt(4))
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bits(train(tmp_path_factory.mktemp("straight")))


def seal(checkpoint: Path, **changes: Any) -> None:
    """A manifest that says of all files what they are now."""
    found = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    files = {path.relative_to(checkpoint).as_posix(): FileEntry(path.stat().st_size, checksum(path)) for path in found}
    before = Manifest.read(checkpoint)
    manifest = Manifest.of(files, changes.get("step", before.step), changes.get("world_size", before.world_size))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest.to_json()))


def places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    if place:
        yield place
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*place, key))


def put(checkpoint: Path, name: str, place: tuple[Any, ...], value: Any) -> None:
    """Writes another value (or none, for `...`) into a sealed checkpoint."""
    path = checkpoint / name
    tree = holder = json.loads(path.read_text())
    for key in place[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = copy.deepcopy(value)
    path.write_text(json.dumps(tree).replace(json.dumps(RAW), INFINITE))
    seal(checkpoint)


def copied(stopped: Path, folder: Path) -> Path:
    return Path(shutil.copytree(stopped, folder / "run"))


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("counters", "epoch"), -1, r"counters.epoch=-1 makes no sense; it must be a whole number of at least 0"),
        (("counters", "epoch"), 5, "as many as lie before epoch=5, position=32: 192 to 342"),
        (("counters", "position"), 10**6, "counters.position=1000000 makes no sense"),
        (("counters", "position"), 33, "counters.samples=32 makes no sense"),
        (("counters", "step"), 10**9, "counters.step=1000000000 makes no sense; it must be 4, as the manifest says"),
        (("counters", "samples"), RAW, "1e999 is larger than a number can be"),
        (("counters", "samples"), NAN, "counters.samples=nan makes no sense"),
        (("counters", "step"), True, "counters.step=True makes no sense"),
        (("counters", "best_step"), 3, "counters.best_step=3 makes no sense; it must be there where best_metric is"),
        (("counters", "micro_batch"), 0, "counters.micro_batch=0 makes no sense"),
        (("counters", "passed_over"), [[0, 5, 2]], r"counters.passed_over\[0\]=\[0, 5, 2\] makes no sense"),
        (("counters", "rollbacks"), 10**6, "counters.rollbacks=1000000 makes no sense"),
        (("plan", "accumulation"), 0, "plan.accumulation=0 makes no sense"),
        (("plan", "processes"), 7, "plan.processes=7 makes no sense; it must be 1, as the manifest says"),
        (("plan", "units", "warmup_steps"), 10**9, "plan.units.warmup_steps=1000000000 makes no sense"),
        (("plan", "devices"), 3, "plan.devices=3 makes no sense; it must be a divisor of batch_size=4"),
        (("seed",), 7, "seed=7 makes no sense; it must be 42, as the arguments say"),
        (("order",), "any", "order='any' makes no sense; it must be one of shuffled, grouped"),
        (("dataset_length",), 63, "dataset_length=63 makes no sense; it must be 62"),
        (("counters",), ..., "it lacks counters"),
        (("plan",), ..., "it lacks plan"),
        (("plan", "units", "warmup_steps"), ..., "plan.units={} makes no sense; it must be with warmup_steps"),
        (
            ("committed", 0, 0),
            "../other/checkpoint-5",
            r"committed=\['../other/checkpoint-5', 1, None\] makes",
        ),
        (("committed", 0, 0), "/tmp/checkpoint-5", "committed="),
        (("committed", 0, 1), -3, "committed="),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_counts_as_damage(
    stopped: Path,
    expected: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    place: tuple[Any, ...],
    value: Any,
    reason: str,
) -> None:
    folder = copied(stopped, tmp_path)
    put(folder / "checkpoint-4", TRAINER, place, value)
    assert bits(train(folder)) == expected
    assert "checkpoint-4 is skipped" in caplog.text
    assert re.search(reason, caplog.text), caplog.text
    with pytest.raises(CheckpointError, match=reason):
        put_and_resume(stopped, tmp_path / "again", place, value)


def put_and_resume(stopped: Path, folder: Path, place: tuple[Any, ...], value: Any) -> None:
    """Asks for the damaged checkpoint itself."""
    folder.mkdir()
    checkpoint = copied(stopped, folder) / "checkpoint-4"
    put(checkpoint, TRAINER, place, value)
    make_trainer(folder / "new", max_steps=6).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["trainer", "optimizer", "lr_scheduler", "ledger", "callbacks"])
def test_a_sealed_checkpoint_that_lacks_a_state_is_skipped(
    stopped: Path, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = copied(stopped, tmp_path)
    (folder / "checkpoint-4" / "state" / f"{name}.json").unlink()
    (folder / "checkpoint-4" / "state" / f"{name}.safetensors").unlink(missing_ok=True)
    seal(folder / "checkpoint-4")
    assert bits(train(folder)) == expected
    assert "checkpoint-4 is skipped" in caplog.text


@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("optimizer", ("param_groups", 0, "betas"), ..., "it lacks param_groups[0].betas"),
        ("optimizer", ("param_groups", 0, "lr"), -1, "param_groups[0].lr=-1 makes no sense; it must be 0.005"),
        ("optimizer", ("param_groups", 0, "eps"), 10**6, "param_groups[0].eps=1000000 makes no sense"),
        ("optimizer", ("param_groups", 0, "initial_lr"), 0.02, "initial_lr=0.02 makes no sense; it must be 0.01"),
        ("optimizer", ("param_groups", 0, "maximize"), None, "maximize=None makes no sense; it must be true or false"),
        ("optimizer", ("param_groups", 0, "param_names", 0), "x", "param_names=['x', "),
        ("optimizer", ("state",), ..., "it does not name the tensor"),
        ("optimizer", ("state", "value", 4, 0), "x", "state=[0, 1, 2, 3, 'x', 5] makes no sense"),
        ("optimizer", ("param_groups", 0, "betas", "value", 1), -0.5, "param_groups[0].betas=(0.9, -0.5) makes no"),
        ("optimizer", ("param_groups", 1, "params"), [0], "with the 4 parameters from 2 on"),
        ("optimizer", ("trainer_kit.groups",), ..., "does not describe its parameters"),
        ("callbacks", ("EarlyStopping", "failures"), -1, "EarlyStopping does not take its state"),
        ("callbacks", ("EarlyStopping", "failures"), ..., "EarlyStopping does not take its state"),
        ("callbacks", ("EMA", "averages"), {}, "it does not name the tensor"),
        ("ledger", ("memberships", "members"), {"x": -1}, "memberships.members={'x': -1} makes no sense"),
    ],
    ids=str,
)
def test_states_that_make_no_sense_count_as_damage(
    stopped: Path,
    expected: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    place: tuple[Any, ...],
    value: Any,
    reason: str,
) -> None:
    folder = copied(stopped, tmp_path)
    put(folder / "checkpoint-4", f"state/{name}.json", place, value)
    assert bits(train(folder)) == expected
    assert reason in caplog.text


def test_a_stream_whose_place_makes_no_sense_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = train(tmp_path / "straight", dataset=Stream())
    train(tmp_path / "run", StopAt(4), dataset=Stream())
    put(tmp_path / "run" / "checkpoint-4", "state/data.json", ("turn",), 7)
    assert digest(train(tmp_path / "run", dataset=Stream())) == digest(straight)
    assert "turn=7 makes no sense; it must be below 1" in caplog.text


def test_a_scale_that_makes_no_sense_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = train(tmp_path / "straight", mixed_precision="fp16")
    train(tmp_path / "run", StopAt(4), mixed_precision="fp16")
    put(tmp_path / "run" / "checkpoint-4", "state/precision.json", ("scale",), -3.0)
    assert digest(train(tmp_path / "run", mixed_precision="fp16")) == digest(straight)
    assert "scale=-3.0 makes no sense; it must be above 0" in caplog.text


def test_a_schedule_whose_step_makes_no_sense_is_refused(stopped: Path, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path)
    put(folder / "checkpoint-4", "state/lr_scheduler.json", ("last_epoch",), None)
    with pytest.raises(ValueError, match=r"the Schedule does not take the state in .*checkpoint-4: TypeError"):
        train(folder)


def outcome(folder: Path) -> str:
    """The bits of the resumed run, or that a sentence refuses it as another training's."""
    try:
        return bits(train(folder))
    except ValueError as error:
        if any(each in str(error) for each in OTHERS):
            return "refused"
        raise


class Adapting(torch.optim.SGD):
    """As third-party ones: an infinite option, a count among its options, and a state that is no parameter's."""

    def __init__(self, params: Any, lr: float = 1e-2, growth_rate: float = math.inf) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group |= {"growth_rate": growth_rate, "k": 0, "curve": np.ones(3), "mask": torch.tensor([1.0, 2.0])}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["global"]["steps"] = self.state["global"].get("steps", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            group["k"] += 10**6


class Strict(torch.optim.SGD):
    """Takes no rate of 0, at which a run may end."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        assert lr > 0
        super().__init__(params, lr=lr, momentum=0.9)


class OwnSchedule:
    """Counts as no schedule of torch's does, and keeps no dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.last_epoch = optimizer, 0.0

    def step(self) -> None:
        self.last_epoch += 0.1

    def state_dict(self) -> list[float]:
        return [self.last_epoch]

    def load_state_dict(self, state: list[float]) -> None:
        self.last_epoch = state[0]

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


class History(Callback):
    """Keeps an array, and more of them in the run."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def on_init_end(self, run: Run) -> None:
        run.stateful["history"] = History({"losses": np.arange(3.0), "names": np.array(["a"]), "none": np.zeros(0)})

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        assert type(state_dict) is type(self.state)
        self.state = state_dict


class HalvedPeaks(Callback):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 1 and hasattr(run.lr_scheduler, "base_lrs"):
            run.lr_scheduler.base_lrs = [rate / 2 for rate in run.lr_scheduler.base_lrs]


@pytest.mark.parametrize(
    ("optimizer", "schedule", "state"),
    [
        (Adapting, None, None),
        (Strict, None, None),
        (torch.optim.SGD, OwnSchedule, None),
        (torch.optim.SGD, lambda made: torch.optim.lr_scheduler.StepLR(made, 2), None),
        (lambda parameters: torch.optim.AdamW(parameters, lr=np.float32(0.01), eps=np.float64(1e6)), None, None),
        (lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)), None, None),
        (lambda parameters: torch.optim.Adafactor(parameters, eps=(None, 1e-3)), None, None),
        (torch.optim.AdamW, None, {"losses": np.arange(4.0)}),
        (torch.optim.AdamW, None, [1, 2]),
    ],
)
def test_objects_of_the_users_are_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: Any, schedule: Any, state: Any
) -> None:
    for stop in ([StopAt(4), HalvedPeaks()], []):
        callbacks = [*stop, *([] if state is None else [History(state)])]
        trainer = make_trainer(tmp_path, *callbacks, max_steps=6, eval_strategy="no", save_steps=2)
        trainer.optimizer, trainer.lr_scheduler = optimizer(trainer.run.model.parameters()), schedule
        trainer.train(resume_from_checkpoint=True)
    assert "passed over" not in caplog.text
    assert trainer._loop.checkpoints.resumed_from == tmp_path / "checkpoint-4"


def test_options_that_changed_are_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the class of a user calls them."""

    def make(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        made = Strict(parameters)
        for group in made.param_groups:
            group |= options
        return made

    before = {"clip": None, "mode": "auto", "flag": 1, "limit": math.inf, "eps": 1e-8}
    after = {"clip": 1.0, "mode": 0.5, "flag": True, "limit": 1.0, "eps": (1e-8, 1e-3)}
    for options, stop in ((before, [StopAt(4)]), (after, [])):
        trainer = make_trainer(tmp_path, *stop, max_steps=6, eval_strategy="no", save_steps=2)
        trainer.optimizer = make(trainer.run.model.parameters(), **options)
        trainer.train(resume_from_checkpoint=True)
    assert "passed over" not in caplog.text
    assert trainer._loop.checkpoints.resumed_from == tmp_path / "checkpoint-4"


def test_a_dataset_smaller_than_a_batch_goes_on_with_smaller_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = []
    for size, stop in ((64, 2), (4, 3), (4, 5)):
        trainer = make_trainer(
            tmp_path, StopAt(stop), dataset=Noisy(10), per_device_train_batch_size=size, num_train_epochs=8,
            eval_strategy="no", gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=True)
        resumed.append(trainer._loop.checkpoints.resumed_from and trainer._loop.checkpoints.resumed_from.name)
    assert "passed over" not in caplog.text
    assert resumed == [None, "checkpoint-2", "checkpoint-3"]


def test_another_growth_interval_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, StopAt(4), mixed_precision="fp16")
    put(tmp_path / "checkpoint-4", "state/precision.json", ("growth_interval",), 100)
    put(tmp_path / "checkpoint-4", "state/precision.json", ("growth_factor",), 1.5)
    train(tmp_path, mixed_precision="fp16")
    assert "passed over" not in caplog.text


def test_a_checkpoint_that_is_saved_again_keeps_all_resumable(tmp_path: Path) -> None:
    """After a rollback that went back by more than one."""
    saver = AsyncSaver(make_trainer(tmp_path).run, lambda directory: True, lambda: None)
    saver.committed = [Committed("checkpoint-2", 1), Committed("checkpoint-6", 3), Committed("checkpoint-4", 2)]
    again = saver.committed_with(Committed("checkpoint-8", 0))
    assert [each.number for each in again] == [1, 3, 2, 4]
    _check_committed(CheckedFile(tmp_path), [[each.name, each.number, each.metric] for each in again])


def test_a_trial_changes_no_callback(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    inner = transformers.EarlyStoppingCallback(3)
    events = CallbackList([from_transformers(inner)])
    [(name, state)] = events.state_dict().items()
    state["attributes"]["early_stopping_patience_counter"] = 2
    events.check_state_dict({name: state}, tmp_path)
    assert inner.early_stopping_patience_counter == 0


def fuzz(stopped: Path, expected: str, examples: int, is_random: bool) -> None:
    """Puts nonsense at any place of any JSON file of the newest checkpoint, seals it and resumes."""
    newest = stopped / "checkpoint-4"
    names = sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*.json"))
    names = [name for name in names if name not in ("manifest.json", "config.json")]
    found = [(name, place) for name in names for place in places(json.loads((newest / name).read_text()))]
    options = {"max_examples": examples, "deadline": None, "derandomize": not is_random, "database": None}

    @hypothesis.settings(**options, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(found), st.sampled_from([..., *NONSENSE]))
    def test(target: tuple[str, tuple[Any, ...]], value: Any) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = copied(stopped, Path(name))
            put(folder / "checkpoint-4", *target, value)
            hypothesis.note(f"{target}: {value}")
            hypothesis.assume("units" not in target[1] or value != 10**6)  # a step can have as many samples
            is_count = type(value) is int and value > 0
            # As many evaluations can have failed, and as many processes and devices can have trained before.
            hypothesis.assume(not (is_count and {"failures", "full_processes", "full_devices"} & {*target[1]}))
            assert outcome(folder) in (expected, "refused")

    test()


@pytest.mark.slow
def test_nonsense_anywhere_is_the_same_run_or_skipped(stopped: Path, expected: str) -> None:
    fuzz(stopped, expected, 25, is_random=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        train(Path(name) / "stopped", StopAt(4))
        fuzz(Path(name) / "stopped", bits(train(Path(name) / "straight")), int(sys.argv[1]), is_random=True)

"""What a run that broke off leaves behind: the batch, the weights, and where the step went wrong."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer_kit import Callback, NonFiniteError, Run, SingleDevice, Trainer, TrainingArguments
from trainer_kit.checkpoint import load_tensors, read_arguments, read_state, verify
from trainer_kit.data.sampling import mix, permutation
from trainer_kit.debugging.crash_dump import SPOILED, CrashDump
from trainer_kit.errors import CallbackError, DataError
from trainer_kit.loop.step_metrics import StepSpan

SAMPLES = 64
BAD = 33


class Net(nn.Module):
    """Raises when it is called for the `fails_at`-th time; keeps what it was given."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2))
        self.head = Head()
        self.fails_at = fails_at
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, graph: Any = None) -> torch.Tensor:
        self.given.append(x.clone())
        self.head.fails = len(self.given) == self.fails_at
        return self.head(self.body(x)).square().mean()


class Exploding(nn.Module):
    """Training makes its weights grow until `exp` overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 1), Exp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.layers(x).mean()


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("no such head")
        return x @ self.weight


class Graph:
    """Something of a user's own."""

    def __repr__(self) -> str:
        return "Graph(5 nodes)"


class Noisy:
    """Samples with noise; reading one of them may raise."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.raises_at = raises_at

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.raises_at:
            raise OSError("a rotten file")
        return {"x": torch.full((3,), index / SAMPLES) + torch.randn(3)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(SAMPLES):
            yield {"x": torch.full((3,), float("inf") if index == BAD else 0.5)}


class RaiseIn(Callback):
    def __init__(self, hook: str, step: int) -> None:
        def raise_then(run: Run, *arguments: Any) -> None:
            if run.state.step == step:
                raise LookupError(f"in {hook}")

        setattr(self, hook, raise_then)


def points(bad: int | None = BAD) -> list[dict[str, torch.Tensor]]:
    samples = [{"x": torch.full((3,), index / SAMPLES)} for index in range(SAMPLES)]
    if bad is not None:
        samples[bad]["x"][1] = float("inf")
    return samples


def make(folder: Path, dataset: Any, model: nn.Module | None = None, *callbacks: Callback, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "logging_steps": 100,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": (),
        "disable_tqdm": True,
        **changes,
    }
    return Trainer(model or Net(), TrainingArguments(str(folder), **settings), dataset, callbacks=callbacks)


def left_by(folder: Path) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The one crash folder, its report and its micro-batches."""
    (crash,) = folder.glob("crash-*")
    verify(crash)
    report, batch = read_state(crash, "report"), read_state(crash, "batch")
    assert report is not None
    assert batch is not None
    return crash, report, batch


def step_of(sample: int, window: int = 4) -> int:
    """The step of the first epoch that takes a sample."""
    return permutation(SAMPLES, 42, 0).tolist().index(sample) // window + 1


def test_a_bad_sample_that_is_noticed_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(BAD)
    before = make(tmp_path / "before", points(), max_steps=step - 1)
    before.train()
    trainer = make(tmp_path / "run", points(), logging_steps=step + 7)
    with caplog.at_level(logging.ERROR), pytest.raises(NonFiniteError):
        trainer.train()
    assert trainer.run.state.step == step + 7
    crash, report, (piece,) = left_by(tmp_path / "run")
    order = permutation(SAMPLES, 42, 0).tolist()[4 * step - 4 : 4 * step]
    assert crash.name == f"crash-{step}"
    assert (report["step"], report["epoch"], report["position"]) == (step, 0, 4 * step - 4)
    assert report["error"]["type"] == "NonFiniteError"
    assert report["sample_ids"] == [order] == [piece["sample_ids"]]
    assert torch.equal(piece["batch"]["x"], torch.stack([points()[index]["x"] for index in order]))
    assert piece["seed"] == mix(42, 0, 4 * step - 4)
    assert report["found"]["inputs"] == [f"x of micro-batch 0 holds inf (samples [{BAD}])"]
    assert report["weights_are"] == "before the step"
    assert report["missing"] == []
    weights = load_tensors(crash)
    assert all(torch.equal(value, weights[name]) for name, value in before.run.model.state_dict().items())
    assert read_arguments(crash)["per_device_train_batch_size"] == 4
    assert f"trainer-kit replay {crash}" in caplog.text
    assert report["versions"].keys() >= {"python", "torch", "trainer_kit", "numpy"}


def test_the_generators_are_as_they_were(tmp_path: Path) -> None:
    class Draw(Callback):
        def on_optimizer_step(self, run: Run) -> None:
            if run.state.step == 4:
                self.states = torch.get_rng_state(), np.random.get_state()
                raise LookupError

    draw = Draw()
    with pytest.raises(CallbackError):
        make(tmp_path, Noisy(), None, draw).train()
    rng = read_state(left_by(tmp_path)[0], "rng")
    assert rng is not None
    assert torch.equal(rng["torch"], draw.states[0])
    assert np.array_equal(rng["numpy"][1], draw.states[1][1])


def test_weights_at_which_a_module_overflows(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        make(tmp_path, points(bad=None), Exploding(), learning_rate=10.0, optim="sgd", max_grad_norm=0.0).train()
    crash, report, _ = left_by(tmp_path)
    assert report["found"]["first_module"] == "layers.1 (Exp)"
    assert report["found"]["first_module_made"] == "inf"
    assert report["found"]["inputs"] == report["found"]["weights"] == []
    assert report["found"]["first_parameter"] == "layers.0.bias"
    assert report["error"]["parameter"] == "layers.0.weight"
    assert int(crash.name.removeprefix("crash-")) == report["step"] > 1


def test_all_micro_batches_of_the_step(tmp_path: Path) -> None:
    step = step_of(BAD, window=8)
    with pytest.raises(NonFiniteError):
        make(tmp_path, points(), gradient_accumulation_steps=2).train()
    _, report, batch = left_by(tmp_path)
    order = permutation(SAMPLES, 42, 0).tolist()[8 * step - 8 : 8 * step]
    number = order.index(BAD) // 4
    assert report["step"] == step
    assert report["sample_ids"] == [order[:4], order[4:]]
    assert [piece["seed"] for piece in batch] == [mix(42, 0, 8 * step - 8), mix(42, 0, 8 * step - 4)]
    assert report["found"]["inputs"] == [f"x of micro-batch {number} holds inf (samples [{BAD}])"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_forward(tmp_path: Path, workers: int) -> None:
    model = Net(fails_at=6)
    trainer = make(tmp_path, Noisy(), model, gradient_accumulation_steps=2, dataloader_num_workers=workers)
    with pytest.raises(KeyError):
        trainer.train()
    crash, report, batch = left_by(tmp_path)
    assert crash.name == "crash-3"
    assert report["found"]["first_module"] == "head (Head)"
    assert any("no such head" in line for line in report["traceback"])
    assert [torch.equal(piece["batch"]["x"], x) for piece, x in zip(batch, model.given[4:], strict=True)] == [True] * 2
    assert torch.equal(load_tensors(crash)["head.weight"], model.head.weight)


def test_an_exception_before_any_step_keeps_no_weights(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        make(tmp_path, Noisy(), Net(fails_at=1)).train()
    crash, report, (piece,) = left_by(tmp_path)
    assert crash.name == "crash-1"
    assert report["weights_by_rank"] is None
    assert load_tensors(crash) == {}
    assert piece["whole"]
    assert "no step had been taken" in report["missing"][0]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_begin"])
def test_an_exception_in_a_callback_before_the_first_step(tmp_path: Path, event: str, resumed: bool) -> None:
    if resumed:
        make(tmp_path, points(bad=None), None, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make(tmp_path, points(bad=None), None, RaiseIn(event, 2 if resumed else 0))
    with pytest.raises(CallbackError):
        trainer.train(resume_from_checkpoint=resumed)
    within = event == "on_step_begin"  # then the step's batch is kept
    assert [folder.name for folder in tmp_path.glob("crash-*")] == [f"crash-{3 if resumed else 1}"] * within


def test_an_exception_in_a_callback_within_a_step(tmp_path: Path) -> None:
    with pytest.raises(CallbackError):
        make(tmp_path, points(bad=None), None, RaiseIn("on_pre_optimizer_step", 3)).train()
    crash, report, (piece,) = left_by(tmp_path)
    assert crash.name == "crash-4"
    assert piece["whole"]
    assert report["causes"] == ["LookupError: in on_pre_optimizer_step"]


def test_an_exception_in_a_callback_between_steps(tmp_path: Path) -> None:
    with pytest.raises(CallbackError):
        make(tmp_path, points(bad=None), None, RaiseIn("on_step_end", 3)).train()
    crash, report, batch = left_by(tmp_path)
    assert crash.name == "crash-3"
    assert batch == []
    assert report["missing"] == ["batch: no step was being taken"]
    assert report["weights_are"] == "as they were when the error was raised"


def test_a_sample_that_cannot_be_read(tmp_path: Path) -> None:
    step = step_of(BAD)
    with pytest.raises(DataError):
        make(tmp_path, Noisy(raises_at=BAD)).train()
    _, report, (piece,) = left_by(tmp_path)
    assert report["step"] == step
    assert BAD in piece["sample_ids"]
    assert piece["batch"] is None
    assert not piece["whole"]
    assert f"the dataset raised at index {BAD}" in report["missing"][0]


def test_a_sample_that_cannot_be_read_only_once(tmp_path: Path) -> None:
    class Flaky(Noisy):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            try:
                return super().__getitem__(index)
            finally:
                if index == self.raises_at:
                    self.raises_at = None

    with pytest.raises(DataError):
        make(tmp_path, Flaky(raises_at=BAD)).train()
    _, report, (piece,) = left_by(tmp_path)
    assert report["step"] == step_of(BAD)
    assert BAD in piece["sample_ids"]
    assert piece["whole"]


def test_a_sample_that_was_to_be_read_one_batch_ahead(tmp_path: Path) -> None:
    class Ahead(SingleDevice):
        def prepare_loader(self, batches: Iterable[Any]) -> Iterator[Any]:
            first, second = itertools.tee(batches)
            next(second)
            return (each for each, _ in itertools.zip_longest(first, second))

    trainer = make(tmp_path, Noisy(raises_at=BAD))
    trainer.run.strategy = Ahead("cpu")
    with pytest.raises(DataError):
        trainer.train()
    crash, report, (piece,) = left_by(tmp_path)
    assert crash.name == f"crash-{step_of(BAD)}"
    assert trainer.run.state.step == report["step"] - 2
    assert report["position"] == piece["start"] == 4 * step_of(BAD) - 4
    assert BAD in piece["sample_ids"]


def test_an_iterable_dataset_whose_batch_is_gone(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        make(tmp_path, Stream(), max_steps=16).train()
    _, report, batch = left_by(tmp_path)
    assert report["step"] == BAD // 4 + 1
    assert batch == []
    assert "set logging_steps=1" in report["missing"][0]


def test_an_iterable_dataset_whose_batch_is_there(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        make(tmp_path, Stream(), max_steps=16, logging_steps=1).train()
    _, report, (piece,) = left_by(tmp_path)
    assert piece["sample_ids"] is None
    assert report["found"]["inputs"] == [f"x of micro-batch 0 holds inf (rows [{BAD % 4}])"]


def test_what_cannot_be_stored_is_described(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([sample["x"] for sample in samples]), "graph": (Graph(), torch.ones(2).to_sparse())}

    trainer = make(tmp_path, points())
    trainer.collate = collate
    with pytest.raises(NonFiniteError):
        trainer.train()
    _, report, (piece,) = left_by(tmp_path)
    assert piece["batch"]["graph"][0] == {"described": "Graph(5 nodes)"}
    assert "sparse" in piece["batch"]["graph"][1]["described"]
    assert not piece["whole"]
    assert [sentence.partition(":")[0] for sentence in report["missing"]] == [
        "batch[0]['graph'][0]",
        "batch[0]['graph'][1]",
    ]


def test_no_room_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_kit.debugging import crash_dump as postmortem

    write = postmortem.write_checkpoint

    def full(folder: Path, snapshot: Any, **settings: Any) -> Path:
        if snapshot.model:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, snapshot, **settings)

    monkeypatch.setattr(postmortem, "write_checkpoint", full)
    with pytest.raises(NonFiniteError):
        make(tmp_path, points()).train()
    crash, report, (piece,) = left_by(tmp_path)
    assert piece["whole"]
    assert report["weights_by_rank"] is None
    assert "No space left" in report["missing"][0]
    assert load_tensors(crash) == {}


def test_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Spoil(Callback):
        def on_step_end(self, run: Run) -> None:
            (tmp_path / "run").mkdir(exist_ok=True)
            run.args.max_shard_size = "nonsense"
            raise LookupError("the user's own")

    with caplog.at_level(logging.ERROR), pytest.raises(CallbackError, match="the user's own"):
        make(tmp_path / "run", points(bad=None), None, Spoil()).train()
    assert "could not be kept for a replay" in caplog.text
    assert list((tmp_path / "run").glob("*crash*")) == []


def test_leaving_is_no_crash(tmp_path: Path) -> None:
    class Leave(Callback):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def on_pre_optimizer_step(self, run: Run) -> None:
            raise self.error

    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            make(tmp_path, points(bad=None), None, Leave(error)).train()
    with pytest.raises(ValueError, match="train_dataset"):
        make(tmp_path, None).train()
    assert list(tmp_path.glob("crash-*")) == []


def test_an_earlier_folder_is_replaced_and_retention_leaves_it(tmp_path: Path) -> None:
    for fails_at in (3, 3):
        with pytest.raises(KeyError):
            make(tmp_path, points(bad=None), Net(fails_at)).train()
    crash, _, _ = left_by(tmp_path)
    make(tmp_path, points(bad=None), save_strategy="steps", save_steps=2, save_total_limit=1).train()
    verify(crash)


def test_other_processes_write_what_is_their_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, points(), max_steps=1)
    trainer.train()
    postmortem = CrashDump(trainer.run, trainer._probe.loss, trainer._loop.loader)
    trainer.run.strategy.collectives.rank = 1
    start = 4 * step_of(BAD) - 4
    assert start > 0
    assert postmortem.write(NonFiniteError("the loss is nan", StepSpan(1, 0, 0, 4))) is None
    assert postmortem.write(LookupError("of the main process, in a save")) is None
    assert postmortem.write(LookupError("of the dataset"), fetching=True) is not None
    written = postmortem.write(NonFiniteError("the loss is nan", StepSpan(9, 0, start, start + 4)))
    assert written == tmp_path / "crash-9-rank-1"
    report = read_state(written, "report")
    assert report is not None
    assert (report["rank"], report["weights_by_rank"]) == (1, 0)
    assert report["weights_are"] == SPOILED
    assert load_tensors(written) == {}

"""`auto_find_batch_size`: smaller micro-batches where memory does not suffice, with the same samples a step."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from scenarios.task import StopAt
from torch.utils.data import IterableDataset, get_worker_info

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.loop.batch_size_finder import BatchSizeFinder
from trainer_kit.profiling.time_ledger import HostClock
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.device_info import DeviceInfo

ASKED = {"per_device_train_batch_size": 16, "auto_find_batch_size": True}
GIVEN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


class Hungry(torch.nn.Module):
    """Runs out of memory with more samples than `room`, in the forward or the backward pass."""

    def __init__(self, room: int, when: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.room = room
        self.when = when
        self.refused = 0
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3), persistent=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.mean = 0.9 * self.mean + 0.1 * (x.detach() * self.mask[0]).mean(0)  # another tensor each time
        hidden = self.layers(x) if self.room else x.new_zeros(len(x), 4)  # a batch norm wants two samples
        if self.training and len(x) > self.room and type(x) is torch.Tensor:  # not while it is estimated
            if self.when == "forward":
                self.refuse()
            hidden.register_hook(self.refuse)
        return {"loss": (self.head(hidden)[:, 0] - labels).square().mean()}

    def refuse(self, _: Any = None) -> None:
        self.refused += 1
        raise torch.OutOfMemoryError("out of memory")


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(1.0)} for _ in range(48)]


class Stream(IterableDataset[Any]):
    """An iterable dataset without a state."""

    def __iter__(self) -> Iterator[Any]:
        yield from samples()


class Stateful(Stream):
    """One that goes on where it stands."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        rows = samples()
        while self.place < len(rows):
            self.place += 1
            yield rows[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Tighten(Callback):
    """Takes room away after a step."""

    def __init__(self, step: int, room: int) -> None:
        self.step, self.room = step, room

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.model.room = self.room


def make(
    folder: Path, room: int, *callbacks: Callback, when: str = "forward", data: Any = None, strategy: Any = None,
    model: torch.nn.Module | None = None, **arguments: Any,
) -> Trainer:  # fmt: skip
    args = TrainingArguments(
        str(folder), learning_rate=0.1, report_to="none", disable_tqdm=True, use_cpu=True,
        **{"num_train_epochs": 1, **arguments},
    )  # fmt: skip
    dataset = samples() if data is None else data
    return Trainer(model or Hungry(room, when), args, dataset, callbacks=callbacks, strategy=strategy or Strategy())


class OwnTime(Strategy):
    """Its clock goes on where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.device_info = OwnTimeInfo(self)


class OwnTimeInfo(DeviceInfo):
    def __init__(self, strategy: OwnTime) -> None:
        super().__init__(strategy.device)
        self.strategy = strategy

    def clock(self) -> Any:
        clock = HostClock()
        clock.mark = lambda: self.strategy.now  # type: ignore[method-assign]
        return clock


def trained(folder: Path, room: int, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = make(folder, room, *callbacks, **options)
    trainer.train()
    return trainer


def are_equal(one: Trainer, other: Trainer) -> bool:
    first, second = one.run.model.state_dict(), other.run.model.state_dict()
    assert one.run.state.step == other.run.state.step
    return all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("data", [samples, Stream, Stateful])
@pytest.mark.filterwarnings("ignore:train_dataset has no state_dict")
def test_the_bits_are_those_of_the_layout_that_is_found(tmp_path: Path, when: str, data: Any) -> None:
    found = trained(tmp_path / "found", 4, when=when, data=data(), max_steps=5, **ASKED)
    given = trained(tmp_path / "given", 4, data=data(), max_steps=5, **GIVEN)
    assert found.run.state.micro_batch == 4
    assert found.run.state.step == 5
    assert found.run.model.refused == 2
    assert are_equal(found, given)


@pytest.mark.slow
def test_buffers_are_those_of_the_steps_beginning(tmp_path: Path) -> None:
    """Also after steps that fitted, in which torch does not count what a batch norm changes."""
    found = trained(tmp_path / "found", 16, Tighten(2, 8), max_steps=3, **ASKED)
    trained(tmp_path / "resumed", 16, StopAt(2), max_steps=3, **ASKED)
    resumed = make(tmp_path / "resumed", 8, max_steps=3, **ASKED)
    resumed.train(resume_from_checkpoint=True)
    assert found.run.model.refused == resumed.run.model.refused == 1
    assert are_equal(found, resumed)


@pytest.mark.slow
def test_a_step_in_the_middle_begins_anew(tmp_path: Path) -> None:
    """What was done stays: two steps with 16 samples at once, all others with 4."""
    arguments = {**ASKED, "num_train_epochs": 2, "gradient_accumulation_steps": 1}
    trainer = trained(tmp_path, 16, Tighten(2, 4), **arguments)
    assert (trainer.run.state.step, trainer.run.state.samples, trainer.run.state.micro_batch) == (6, 96, 4)


class Shared(Stream):
    """Workers share the samples."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from samples()[worker.id :: worker.num_workers]

    def __len__(self) -> int:
        return len(samples())


class Listens(Hungry):
    """Keeps what it is trained on."""

    def __init__(self) -> None:
        super().__init__(16)
        self.heard: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = super().forward(x, labels)
        if type(x) is torch.Tensor:
            self.heard += x[:, 0].tolist()
        return output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train_dataset has no state_dict")
def test_workers_that_share_a_stream_give_each_sample_once(tmp_path: Path) -> None:
    model = Listens()
    reading = {"data": Shared(), "dataloader_num_workers": 2, "dataloader_drop_last": True}
    trainer = trained(tmp_path, 16, Tighten(1, 4), model=model, **reading, **ASKED)
    assert trainer.run.state.micro_batch == 4
    assert trainer.run.state.step == trainer.run.total_steps == 2
    assert len(set(model.heard)) == len(model.heard) == 32


def on_two(folder: str, rooms: tuple[int, int], when: str, looks: bool) -> tuple[int | None, int, list[torch.Tensor]]:
    room = rooms[int(os.environ["RANK"])]
    arguments = ASKED | {"auto_find_batch_size": looks, "num_train_epochs": 2}
    trainer = trained(Path(folder), room, when=when, strategy=DDP(), **arguments)
    return trainer.run.state.micro_batch, trainer.run.model.refused, list(trainer.run.model.state_dict().values())


def same_on_two(ones: Any, others: Any) -> bool:
    pairs = [pair for one, other in zip(ones, others, strict=True) for pair in zip(one[2], other[2], strict=True)]
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.distributed
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_one_rank_lacks_all_agree_on(tmp_path: Path, when: str) -> None:
    one = on_ranks(2, on_two, str(tmp_path / "one"), (100, 4), when, True)
    both = on_ranks(2, on_two, str(tmp_path / "both"), (4, 4), when, True)
    assert [each[:2] for each in one] == [(4, 0), (4, 2)]
    assert same_on_two(one, both)


@pytest.mark.distributed
def test_gradients_exchanged_later_are_those_exchanged_in_the_backward_pass(tmp_path: Path) -> None:
    later = on_ranks(2, on_two, str(tmp_path / "later"), (100, 100), "forward", True)
    meanwhile = on_ranks(2, on_two, str(tmp_path / "meanwhile"), (100, 100), "forward", False)
    assert same_on_two(later, meanwhile)


class Wide(torch.nn.Module):
    """Really takes 16 MiB a sample for each of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = (x * self.weight).repeat(1, 2**22 // 3)
        return {"loss": (wide.tanh().mean(1) - labels).square().mean()}


def on_two_of_which_one_is_small(folder: str) -> int | None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    trainer = make(Path(folder), 0, strategy=DDP(), model=Wide(), max_steps=1, **ASKED)
    if os.environ["RANK"] == "1":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 600 * 2**20, hard))
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return trainer.run.state.micro_batch


@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, to limit a process's memory")
def test_memory_that_really_is_not_there(tmp_path: Path) -> None:
    found, other = on_ranks(2, on_two_of_which_one_is_small, str(tmp_path))
    assert found == other
    assert 1 <= found < 16


@pytest.mark.slow
def test_a_resume_begins_with_what_was_found(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 4, num_train_epochs=2, **ASKED)
    trained(tmp_path / "cut", 4, StopAt(2), num_train_epochs=2, **ASKED)
    resumed = make(tmp_path / "cut", 4, num_train_epochs=2, **ASKED)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run.model.refused == 0
    assert resumed.run.state.micro_batch == 4
    assert are_equal(resumed, whole)


class Spoil(Callback):
    """One step's gradient is not finite, the first time that it comes."""

    def __init__(self) -> None:
        self.is_done = False

    def on_pre_optimizer_step(self, run: Run) -> None:
        if run.state.step == 3 and not self.is_done:
            self.is_done = True
            run.model.head.weight.grad.fill_(float("nan"))


@pytest.mark.slow
def test_a_rollback_keeps_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It goes back to before the room became small, and does not try the old size again."""
    trainer = trained(
        tmp_path, 16, Tighten(2, 4), Spoil(), num_train_epochs=2, save_steps=1, nonfinite="rollback", **ASKED
    )
    assert "went back to" in caplog.text
    assert trainer.run.model.refused == 2
    assert trainer.run.state.micro_batch == 4


class Narrow(Strategy):
    def __init__(self) -> None:
        super().__init__()
        self.device_info = NarrowInfo(self.device)


class NarrowInfo(DeviceInfo):
    """A device on which tensors of 1,500 bytes have room beside the model."""

    def free_memory(self) -> int:
        return 1500


def test_the_estimate_is_where_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "trainer_kit"):
        trainer = trained(tmp_path, 100, strategy=Narrow(), log_level="info", **ASKED)
    assert f"parts of at most {trainer.run.state.micro_batch} samples, which are estimated to fit" in caplog.text
    assert trainer.run.model.refused == 0
    assert 1 < trainer.run.state.micro_batch < 16


def test_an_estimate_that_fails_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Looks(Hungry):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            assert torch.isfinite(x).all()
            return super().forward(x, labels)

    with caplog.at_level("INFO", "trainer_kit"):
        trainer = trained(tmp_path, 4, model=Looks(4), **ASKED)
    assert trainer.run.state.micro_batch == 4
    assert "cannot be estimated (" in caplog.text


@pytest.mark.slow
def test_an_error_of_python_has_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Plain(Hungry):
        def refuse(self, _: Any = None) -> None:
            raise MemoryError

    assert trained(tmp_path, 4, model=Plain(4), **ASKED).run.state.micro_batch == 4
    assert "16 samples at once (MemoryError)" in caplog.text


def test_what_is_read_once_cannot_be_read_again(tmp_path: Path) -> None:
    class Once(Stream):
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return samples()[0]

    with pytest.raises(ValueError, match="auto_find_batch_size=True needs a train_dataset that can be read again"):
        trained(tmp_path, 4, data=Once(), max_steps=2, **ASKED)


def test_without_it_the_error_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, room=4, per_device_train_batch_size=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalizes", "refused", "few"),
    [
        (False, 3, "one sample at a time fits into"),
        (True, 2, "3 samples at a time, which a batch norm wants, fit into"),
    ],
)
def test_few_samples_that_do_not_fit_are_an_error(tmp_path: Path, normalizes: bool, refused: int, few: str) -> None:
    model = Hungry(0)
    if not normalizes:
        model.layers = torch.nn.Linear(3, 4)
    with pytest.raises(MemoryError, match=f"not even {few}"):
        trained(tmp_path, 0, model=model, per_device_train_batch_size=4, auto_find_batch_size=True)
    assert model.refused == refused


@pytest.mark.slow
def test_nothing_of_it_outlives_the_training(tmp_path: Path) -> None:
    """Copies of buffers take the device's memory."""
    trainer = trained(tmp_path, 4, **ASKED)
    gc.collect()
    assert trainer.run.state.micro_batch == 4
    assert not [each for each in gc.get_objects() if type(each) is BatchSizeFinder]


def test_where_all_fits_nothing_is_found(tmp_path: Path) -> None:
    """A resume with a larger batch looks itself."""
    trainer = trained(tmp_path, 16, StopAt(2), num_train_epochs=2, **ASKED)
    assert trainer.run.state.micro_batch is None


class HungryLater(Hungry):
    """Wants as much in evaluations."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.training and len(x) > self.room and type(x) is torch.Tensor:
            self.refuse()
        return super().forward(x, labels)


def evaluated_on_two(folder: str, rooms: tuple[int, int]) -> tuple[int, dict[str, float]]:
    model = HungryLater(rooms[int(os.environ["RANK"])])
    trainer = make(Path(folder), 0, model=model, strategy=DDP(), per_device_eval_batch_size=8, **ASKED)
    metrics = trainer.evaluate(samples())
    return model.refused, {"eval_loss": metrics["eval_loss"]}


@pytest.mark.distributed
def test_an_evaluation_that_does_not_fit_begins_anew(tmp_path: Path) -> None:
    whole = on_ranks(2, evaluated_on_two, str(tmp_path / "whole"), (8, 8))
    small = on_ranks(2, evaluated_on_two, str(tmp_path / "small"), (8, 2))
    assert [refused for refused, _ in whole + small] == [0, 0, 0, 2]
    assert small[0][1] == small[1][1] == pytest.approx(whole[0][1], rel=1e-6)


@pytest.mark.slow
def test_an_evaluation_of_which_not_one_sample_fits_is_an_error(tmp_path: Path) -> None:
    trainer = make(tmp_path, 0, model=HungryLater(0), **ASKED)
    with pytest.raises(MemoryError, match="not even one sample at a time fits into the devices' memory in an evaluat"):
        trainer.evaluate(samples())


class Tray(DDP):
    """A device that has no room to take more than 4 samples to, on rank 1."""

    def to_device(self, batch: Any) -> Any:
        if self.rank == 1 and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("no room")
        return super().to_device(batch)

    def prepare_loader(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        for micro in micro_batches:
            micro.batch = self.to_device(micro.batch)
            yield micro


class Sender(Tray):
    """The same, where batches are brought to the device in the step."""

    prepare_loader = DDP.prepare_loader


def carried_on_two(folder: str, strategy: type[DDP]) -> tuple[int | None, int]:
    trainer = trained(Path(folder), 100, strategy=strategy(), num_train_epochs=2, **ASKED)
    return trainer.run.state.micro_batch, trainer.run.state.step


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [Tray, Sender])
def test_a_batch_that_cannot_be_brought_to_the_device_is_cut_too(tmp_path: Path, strategy: type[DDP]) -> None:
    assert on_ranks(2, carried_on_two, str(tmp_path), strategy) == [(4, 4), (4, 4)]


class Bare(Strategy):
    """A device to which nothing can be brought once a step is done."""

    def prepare_loader(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        for micro in micro_batches:
            if micro.global_batch.start:
                raise torch.OutOfMemoryError("no room")
            yield micro


@pytest.mark.slow
def test_what_is_due_is_done_before_an_error_of_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="at step 2"):
        trained(tmp_path, 16, strategy=Bare(), save_steps=1, **ASKED)
    assert (tmp_path / "checkpoint-1").is_dir()


class Ticking(Hungry):
    """Takes a second for each forward pass in training, and more memory from one of them on."""

    def __init__(self, strategy: OwnTime, *wanted: Any) -> None:
        super().__init__(*wanted)
        self.strategy = strategy
        self.passes = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if type(x) is torch.Tensor:
            self.strategy.now += 1
            self.passes += 1
            self.room = 4 if self.passes < 9 else 3
        return super().forward(x, labels)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_a_step_that_begins_anew_took_is_lost(tmp_path: Path, when: str) -> None:
    strategy = OwnTime()
    trainer = trained(tmp_path, 0, model=Ticking(strategy, 4, when), strategy=strategy, **ASKED)
    seconds = trainer.run.ledger.seconds()
    # 16 and 8 samples do not fit, then 4 parts do; in the second step the third does not, and the two before are lost.
    assert (seconds["forward"], seconds["lost"]) == (4 + 6 + 6, 1 + 1 + 3)

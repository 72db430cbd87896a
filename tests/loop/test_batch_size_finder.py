"""`auto_find_batch_size`: smaller micro-batches where memory does not suffice, with the same samples a step."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.hungry import (
    ASKED,
    GIVEN,
    Hungry,
    Stateful,
    Stream,
    Tighten,
    are_equal,
    make,
    samples,
    trained,
)
from kit.ranks import on_ranks
from scenarios.task import StopAt
from torch.utils.data import get_worker_info

from trainer_kit import Callback, Run, Strategy
from trainer_kit.loop.batch_size_finder import BatchSizeFinder
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.device_info import DeviceInfo


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

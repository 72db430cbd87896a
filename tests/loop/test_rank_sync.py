"""What the ranks of a run agree on: the same data, the same start."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import voting
from kit.branches import Branches, own_rank, points, quiet
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from kit.split_training import PLAN, Tower

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.errors import LostProcessError
from trainer_kit.loop.rank_sync import RankSync
from trainer_kit.state import Requests, TrainState
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP


class Reduced(Collectives):
    """A lone process that counts its reductions."""

    reductions = 0

    def all_reduce_ints(self, numbers: Sequence[int]) -> Sequence[int]:
        self.reductions += 1
        return numbers


ARGS = TrainingArguments()
FLAGS = ("log", "evaluate", "save", "copy", "stop", "written", "join")


def test_a_lone_process_reduces_only_requests() -> None:
    """A request that is known and not yet served remains pending."""
    for asked, pending in itertools.product(itertools.product((False, True), repeat=len(FLAGS)), repeat=2):
        collectives, requests = Reduced(), Requests(*asked)
        strategy = SimpleNamespace(collectives=collectives)
        run: Any = SimpleNamespace(strategy=strategy, requests=requests, args=ARGS, state=TrainState(), total_steps=8)
        sync = RankSync(run)
        sync.pending = Requests(*pending)
        assert bool(sync.sync()) == any(asked + pending)
        both = [one or other for one, other in zip(asked, pending, strict=True)]
        assert [getattr(sync.pending, name) for name in FLAGS] == both
        assert not any(getattr(requests, name) for name in FLAGS)
        assert (sync.all_have_read, sync.disagreement, collectives.reductions) == (False, None, int(any(asked)))


class Share(torch.utils.data.IterableDataset[Any]):
    """Divides itself by rank, as it must not: the ranks get other numbers of samples."""

    def __iter__(self) -> Any:
        return iter(points(8 * (1 + own_rank())))


def train_shares(folder: str) -> None:
    strategy = DDP(device="cpu", find_unused_parameters=True)
    Trainer(Branches(), quiet(folder, max_steps=20), Share(), strategy=strategy).train()


@pytest.mark.distributed
def test_a_stream_that_divides_itself_by_rank_is_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_shares, str(tmp_path)):
        assert "train_dataset does not give all processes the same samples" in str(result.error)


class Halves(torch.utils.data.IterableDataset[Any]):
    """Gives each rank as many samples: all of them alike, its half, or all of them in an order of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Any:
        found, rank = points(16), own_rank()
        if self.kind == "half":
            found = found[rank::2]
        elif self.kind == "shuffled" and rank:
            found = found[::-1]
        return iter(found)


def warnings_of_halves(folder: str, kind: str, workers: int) -> tuple[list[str], list[str]]:
    """What a training and an evaluation warn of."""
    args = quiet(folder, max_steps=5, dataloader_num_workers=workers)
    trainer = Trainer(Branches(), args, Halves(kind), strategy=DDP(device="cpu", find_unused_parameters=True))
    found = []
    for task in (trainer.train, lambda: trainer.evaluate(Halves(kind))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            task()
        found.append([str(each.message) for each in caught if "different samples" in str(each.message)])
    return found[0], found[1]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "workers"), [("all", 0), ("half", 0), ("half", 1), ("shuffled", 0)])
def test_streams_that_differ_between_ranks_are_a_warning(tmp_path: Path, kind: str, workers: int) -> None:
    (train, evaluate), others = on_ranks(2, warnings_of_halves, str(tmp_path), kind, workers)
    assert others == ([], [])
    if kind == "all":
        assert (train, evaluate) == ([], [])
        return
    assert [message[:47] for message in train] == ["train_dataset gives the processes different sam"]
    assert [message[:53] for message in evaluate] == ["the dataset to evaluate gives the processes different"]


class Masked(torch.utils.data.Dataset[Any]):
    """Gives rank 1 samples without labels from some call on."""

    reads = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        tokens = torch.arange(4) + index % 7
        return {"input_ids": tokens, "attention_mask": torch.ones(4).long(),
                "labels": torch.full((4,), -100) if own_rank() == 1 and self.reads > 8 else tokens}  # fmt: skip


def train_masked(folder: str) -> None:
    strategy = FSDP(device="cpu", mesh={"shard": 1, "tensor": 2}, tensor_parallel=PLAN)
    Trainer(Tower(), quiet(folder, per_device_train_batch_size=2), Masked(), strategy=strategy).train()


@pytest.mark.distributed
def test_ranks_that_compute_layers_together_must_read_the_same(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_masked, str(tmp_path)):
        assert "ranks 0 to 1 compute layers together, but have read other batches" in str(result.error)


class Broken(torch.utils.data.Dataset[Any]):
    read = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read += 1
        if own_rank() == 1 and self.read > 5:
            raise OSError("the file is gone")
        return points()[index]


def train_broken(folder: str) -> None:
    strategy = DDP(device="cpu", find_unused_parameters=True)
    Trainer(Branches(), quiet(folder), Broken(), strategy=strategy).train()


@pytest.mark.distributed
def test_data_that_one_rank_cannot_read_ends_all(tmp_path: Path) -> None:
    first, second = try_on_ranks(2, train_broken, str(tmp_path))
    assert "another process of this run could not read its data" in str(first.error)
    assert "the file is gone" in str(second.error)


def different(folder: str, what: str) -> None:
    rank = own_rank()
    changes = {"learning_rate": 0.1 * (rank + 1)} if what == "arguments" else {}
    args = quiet(f"{folder}-{rank}" if what == "folder" else folder, **changes)
    Trainer(Branches(), args, points(12 + rank if what == "data" else 12)).train()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("arguments", "learning_rate differs: 0.2 on rank 1, 0.1 on rank 0"),
        ("data", "the length of train_dataset differs: 13 on rank 1, 12 on rank 0"),
        ("folder", "output_dir differs"),
    ],
)
def test_what_differs_between_ranks_is_named(what: str, named: str, tmp_path: Path) -> None:
    for result in try_on_ranks(2, different, str(tmp_path), what):
        assert isinstance(result, RankFailed)
        assert named in str(result.error)


SERVED_AT = {
    ("on_step_begin", "save"): [("save", 6)],
    ("on_step_begin", "log"): [("log", 6)],
    ("on_step_begin", "evaluate"): [("evaluate", 6)],
    ("on_step_begin", "stop"): [],
    ("on_substep_end", "save"): [("save", 6)],
    ("on_pre_optimizer_step", "save"): [("save", 6)],
    ("on_optimizer_step", "evaluate"): [("evaluate", 6)],
    ("on_step_end", "save"): [("save", 5)],
    ("on_step_end", "stop"): [],
    ("on_epoch_end", "evaluate"): [("evaluate", 12)],
    ("on_epoch_begin", "save"): [("save", 13)],
}
LAST = {("on_step_begin", "stop"): 6, ("on_step_end", "stop"): 5}
LATE = ("on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


@pytest.mark.distributed
@pytest.mark.slow
def test_a_request_of_one_rank_is_served_after_the_step_of_one_process(tmp_path: Path) -> None:
    cases = [*SERVED_AT]
    ranks = on_ranks(2, voting.ask_everywhere, str(tmp_path / "two"), cases)
    one = on_ranks(1, voting.ask_everywhere, str(tmp_path / "one"), cases)[0]
    for case, first, second, alone in zip(cases, *ranks, one, strict=True):
        assert first.served == second.served == alone.served == SERVED_AT[case], case
        assert first.last == second.last == alone.last == LAST.get(case, 17), case
        assert first.weights == second.weights == pytest.approx(alone.weights, rel=1e-12), case
        assert (first.ahead > 0) == (case[0] not in LATE), case


@pytest.mark.distributed
@pytest.mark.parametrize("task", [voting.stop_early, voting.change_cadence, voting.read_ragged, voting.roll_back])
def test_two_ranks_do_after_each_step_what_one_process_does(task: Callable[[str], Any], tmp_path: Path) -> None:
    first, second = on_ranks(2, task, str(tmp_path / "two"))
    alone = on_ranks(1, task, str(tmp_path / "one"))[0]
    assert first.served == second.served == alone.served
    assert first.last == second.last == alone.last
    assert first.weights == second.weights == pytest.approx(alone.weights, rel=1e-12)
    assert first.ahead == second.ahead > 0
    assert alone.ahead == 0


@pytest.mark.distributed
def test_a_callback_of_one_rank_makes_all_vote_after_the_step(tmp_path: Path) -> None:
    for result in on_ranks(2, voting.listen_on_one_rank, str(tmp_path)):
        assert (result.served, result.ahead) == ([("save", 3)], 0)


@pytest.mark.distributed
def test_a_signal_late_in_a_step_ends_the_run_at_most_one_step_later(tmp_path: Path) -> None:
    first, second = on_ranks(2, voting.leave, str(tmp_path))
    assert first == second == (143, 5, ["checkpoint-5"])


@pytest.mark.distributed
def test_data_that_cannot_be_read_ends_the_run_when_its_step_begins(tmp_path: Path) -> None:
    (other, taken), (own, also_taken) = on_ranks(2, voting.read_broken, str(tmp_path))
    assert "another process of this run could not read its data" in other
    assert "the file is gone" in own
    assert (taken, also_taken) == (5, 5)  # of 4 samples each; sample 22 is in the sixth


def lose_requests(folder: str) -> tuple[bool, ...]:
    trainer = Trainer(Branches(), quiet(folder), points(8))
    run = trainer.run
    run.requests.log = run.requests.save = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.strategy.collectives), "all_reduce_ints", fail_to_sum)
        sync = RankSync(run)
        with pytest.raises(LostProcessError):
            sync.sync()
    sync.pending.evaluate = True
    sync.hand_back()
    sync.close()
    return run.requests.log, run.requests.evaluate, run.requests.save, run.requests.stop


def fail_to_sum(*given: Any) -> Any:
    raise LostProcessError("rank 1 ended")


def test_requests_outlast_the_loss_of_a_process(tmp_path: Path) -> None:
    assert lose_requests(str(tmp_path)) == (True, True, True, False)

"""Trainings in the order of a user's sampler: exact resumes, one order on all ranks, the batches of batch samplers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.data_training import Classifier, check_resume, rows, train, weights
from kit.ranks import RankFailed, on_ranks
from kit.trainer import arguments
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from trainer_kit import Trainer, balanced_sampler

WEIGHTS = [1.0 + index % 5 for index in range(22)]


class Buckets:
    """A batch sampler whose batches have different sizes, in an order of their own in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9], [10], [11, 12, 13, 14, 15, 16], [17, 18, 19, 20, 21]]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)


class Unseeded:
    """A sampler whose order nothing determines."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(22), 22))

    def __len__(self) -> int:
        return 22


class Drifting:
    """A sampler whose order follows from how often it was asked, which its state holds."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(22), 22))

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class Counting:
    """A sampler whose order follows from how often it was asked, and from a generator that it never seeds again."""

    def __init__(self) -> None:
        self.passes = 0
        self.generator = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([*self.generator.sample(range(22), 21), self.passes])

    def __len__(self) -> int:
        return 22


class Growing:
    """A sampler without a length, whose epochs become longer; `in_batches` of up to four."""

    def __init__(self, in_batches: bool = False) -> None:
        self.passes = 0
        self.in_batches = in_batches

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = random.Random(self.passes).sample(range(22), 8 + 4 * self.passes)
        return iter([order[start : start + 4] for start in range(0, len(order), 4)] if self.in_batches else order)


SAMPLERS: dict[str, Any] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 30),
    "seeded": lambda: RandomSampler(range(22), generator=torch.Generator().manual_seed(3)),
    "batches": Buckets,
    "random batches": lambda: BatchSampler(RandomSampler(range(22)), 5, drop_last=False),
    "stateful": Drifting,
    "counting": Counting,
    "batches of a counting one": lambda: BatchSampler(Counting(), 4, drop_last=False),
    "balanced": lambda: balanced_sampler([index % 3 for index in range(22)]),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_continues_a_sampler_s_order_bit_for_bit(tmp_path: Path, kind: str, workers: int) -> None:
    steps = check_resume(
        tmp_path, rows, make_given=lambda: {"train_sampler": SAMPLERS[kind]()}, dataloader_num_workers=workers
    )
    middle = len(steps.samples) // 2
    epochs = [[*itertools.chain(*each)] for each in (steps.samples[:middle], steps.samples[middle:])]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("step", [6, 12, 15])
@pytest.mark.parametrize("kind", ["counting", "batches of a counting one", "stateful", "seeded", "weighted"])
def test_a_resume_in_a_later_epoch_continues_what_a_sampler_counts(tmp_path: Path, kind: str, step: int) -> None:
    length = 8 if kind == "weighted" else 6  # steps of an epoch
    step = step // 6 * length + step % 6
    options = {"num_train_epochs": 3, "save_steps": step}
    check_resume(tmp_path, rows, make_given=lambda: {"train_sampler": SAMPLERS[kind]()}, step=step, **options)


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("step", [3, 7, 9])
def test_epochs_of_a_sampler_without_a_length_are_counted_one_by_one(
    tmp_path: Path, in_batches: bool, step: int
) -> None:
    def make_given() -> dict[str, Any]:
        return {"train_sampler": Growing(in_batches)}

    steps = check_resume(
        tmp_path,
        rows,
        make_given=make_given,
        step=step,
        num_train_epochs=3,
        save_steps=step,
        lr_scheduler_type="linear",
    )
    sampler = Growing()
    assert [*itertools.chain(*steps.samples)] == [index for _ in range(3) for index in sampler]
    assert len(steps.samples) == 3 + 4 + 5


def test_the_epochs_of_a_sampler_that_cannot_be_copied_are_taken_to_be_equal(tmp_path: Path) -> None:
    sampler: Any = Growing()
    sampler.lock = threading.Lock()
    with pytest.warns(UserWarning, match="the Growing gives 16 indices in epoch 1 instead of 12: epochs and steps are"):
        _, steps = train(tmp_path, rows(), given={"train_sampler": sampler})
    assert len(steps.samples) == 6


def test_plans_and_estimates_do_not_draw_from_the_sampler(tmp_path: Path) -> None:
    sampler = Counting()
    trainer = Trainer(Classifier(), arguments(tmp_path, max_steps=2), rows(), train_sampler=sampler)
    trainer.plan()
    trainer.estimate()
    assert sampler.passes == 0
    trainer.train()
    assert sampler.passes == 1


def test_another_order_is_told_of_at_the_end_of_an_epoch_too(tmp_path: Path) -> None:
    train(tmp_path, rows(), given={"train_sampler": Unseeded()}, save_steps=6)
    with pytest.warns(UserWarning, match="the Unseeded gives another order in epoch 0 than before: this resume is not"):
        train(tmp_path, rows(), "checkpoint-6", given={"train_sampler": Unseeded()})


@pytest.mark.slow
def test_workers_may_read_ahead_over_several_short_epochs(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        _, steps = train(
            tmp_path / str(workers),
            rows(4),
            given={"train_sampler": SubsetRandomSampler(range(4))},
            num_train_epochs=6,
            per_device_train_batch_size=2,
            dataloader_num_workers=workers,
        )
        found.append((steps.samples, steps.losses))
    assert found[0] == found[1]
    assert len(found[0][0]) == 12


def test_each_batch_of_a_batch_sampler_is_a_micro_batch(tmp_path: Path) -> None:
    trainer, steps = train(tmp_path, rows(), given={"train_sampler": Buckets()}, gradient_accumulation_steps=4)
    sampler, expected = Buckets(), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [*sampler]
        expected += [[*itertools.chain(*batches[:4])], [*itertools.chain(*batches[4:])]]
    assert steps.samples == expected
    assert trainer.run.state.samples == 44


def test_an_order_that_does_not_come_back_is_told_of(tmp_path: Path) -> None:
    train(tmp_path, rows(), given={"train_sampler": Unseeded()})
    with pytest.warns(UserWarning, match="the Unseeded gives another order in epoch 0 than before: this resume is not"):
        train(tmp_path, rows(), "checkpoint-3", given={"train_sampler": Unseeded()})


def test_a_wrong_length_is_told_of(tmp_path: Path) -> None:
    class Short(Buckets):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[list[int]]:
            batches = [*super().__iter__()]
            return iter(batches if self.epoch else [batches[0] + batches[1], *batches[2:]])

    with pytest.warns(UserWarning, match=r"the Short gives 6 batches in epoch 1 instead of 5: .* are miscounted; give"):
        train(tmp_path, rows(), given={"train_sampler": Short()})


def test_a_length_that_is_not_that_of_the_first_epoch_does_not_count(tmp_path: Path) -> None:
    class Short(Buckets):
        def __len__(self) -> int:
            return 5

    _, steps = train(tmp_path, rows(), given={"train_sampler": Short()})
    assert len(steps.samples) == 12


def test_a_resume_needs_the_same_kind_of_order(tmp_path: Path) -> None:
    train(tmp_path, rows(), given={"train_sampler": Buckets()})
    with pytest.raises(ValueError, match=r"the run has shuffled samples, but .* was made with a sampler"):
        train(tmp_path, rows(), "checkpoint-3")
    train(tmp_path / "plain", rows())
    with pytest.raises(ValueError, match=r"the run has a sampler, but .* was made with shuffled samples"):
        train(tmp_path / "plain", rows(), "checkpoint-3", given={"train_sampler": Buckets()})
    with pytest.raises(ValueError, match=r"the run has the dataset's order, but .* was made with shuffled samples"):
        train(tmp_path / "plain", rows(), "checkpoint-3", shuffle=False)
    with pytest.raises(ValueError, match=r"the run has the dataset's order, but .* was made with shuffled samples"):
        train(tmp_path / "plain", DataLoader(rows(), batch_size=4), "checkpoint-3")
    train(tmp_path / "plain", DataLoader(rows(), batch_size=4, shuffle=True), "checkpoint-3", shuffle=False)


def test_a_sampler_or_drop_last_that_changed_does_not_make_a_checkpoint_damaged(tmp_path: Path) -> None:
    short = SubsetRandomSampler(range(10))
    trainer, _ = train(tmp_path / "sampler", rows(), given={"train_sampler": short}, save_steps=2)
    with pytest.raises(ValueError, match=r"the run has shuffled samples, but .* was made with a sampler"):
        train(tmp_path / "sampler", rows(), "checkpoint-2")
    loader = DataLoader(rows(), batch_size=4, shuffle=True, drop_last=True)
    train(tmp_path / "dropped", loader)
    trainer, steps = train(tmp_path / "dropped", DataLoader(rows(), batch_size=4, shuffle=True), "checkpoint-3")
    assert len(steps.samples) == trainer.run.state.step - 3
    assert sorted([*itertools.chain(*steps.samples[-6:])]) == [*range(22)]


def test_without_shuffling_the_order_is_the_dataset_s(tmp_path: Path) -> None:
    steps = check_resume(tmp_path, rows, shuffle=False)
    assert [*itertools.chain(*steps.samples)] == [*range(22), *range(22)]


# Several ranks


def sampled(folder: str, kind: str, resume: str | None = None, **options: Any) -> Any:
    trainer, steps = train(folder, rows(), resume, {"train_sampler": SAMPLERS[kind]()}, **options)
    return weights(trainer), steps.losses, steps.samples, trainer.run.state.samples


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["weighted", "batches"])
def test_two_ranks_take_the_steps_of_one_and_resume_as_one(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "save_steps": 2, "max_grad_norm": 0.0}
    if kind == "batches":
        options["learning_rate"] = 0.0  # dropout is drawn by rank, so that only the samples are compared
    one = sampled(str(tmp_path / "one"), kind, gradient_accumulation_steps=2, **options)
    two = on_ranks(2, sampled, str(tmp_path / "two"), kind, **options)
    assert [sorted({*a, *b}) for a, b in zip(two[0][2], two[1][2], strict=True)] == [sorted({*step}) for step in one[2]]
    assert two[0][3] == one[3]
    rest = sampled(str(tmp_path / "two"), kind, "checkpoint-2", gradient_accumulation_steps=2, **options)
    assert [sorted(step) for step in rest[2]] == [sorted(step) for step in one[2][2:]]


def unseeded(folder: str) -> None:
    train(folder, rows(), given={"train_sampler": Unseeded()})


@pytest.mark.distributed
def test_ranks_with_different_orders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="does not give all processes the same samples in the same order"):
        on_ranks(2, unseeded, str(tmp_path))


def test_the_plan_knows_a_sampler(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=2)
    plan = Trainer(Classifier(), args, rows(), train_sampler=Buckets()).plan()
    assert plan.problems == ()
    assert plan.steps.last == 12

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.build import make_train_loader
from trainer_kit.data.collate import stack
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.run_length import RunLength, make_plan
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.collectives import Collectives

READING = LoaderConfig(stack, 0)
relaxed = settings(max_examples=200)


class Ranks(Strategy):
    """As many processes as are asked for."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.collectives = Collectives(world_size=processes)


def make_run(length: int, batch_size: int = 8, accumulation: int = 1, processes: int = 1, **arguments: Any) -> Run:
    args = TrainingArguments(
        per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, **arguments
    )
    return Run(args, Ranks(processes), torch.nn.Linear(1, 1), train_dataset=[torch.ones(1)] * length)


def plan_of(run: Run, before: tuple[Run, RunLength] | None = None, passed_over: Any = ()) -> RunLength:
    loader = make_train_loader(run, READING, saved=None if before is None else before[1].state_dict())
    loader.passed_over = passed_over
    return make_plan(run, loader, None if before is None else (before[1].state_dict(), before[0].args.to_dict()))


def advance(run: Run, steps: int, passed_over: Any = ()) -> int:
    """Counts as the loop does, at most so many steps; returns how many were taken."""
    loader, state = make_train_loader(run, READING), run.state
    loader.passed_over = passed_over
    steps = min(steps, plan_of(run, passed_over=passed_over).last_step - state.step)
    for micro in loader.micro_batches(state.epoch, state.position, steps):
        if micro.is_last:
            state.step, state.epoch, state.position = state.step + 1, micro.global_batch.epoch, micro.global_batch.stop
            if micro.global_batch.closes_epoch:
                state.epoch, state.position = state.epoch + 1, 0
    return steps


@pytest.mark.parametrize(
    ("steps", "epochs"),
    [(1, 1 / 5), (5, 1), (8, 8 / 5), (15, 3)],  # an epoch of 33 samples is 4 steps of 8 and one of 1
)
def test_the_epochs_of_a_number_of_steps(steps: int, epochs: float) -> None:
    run = make_run(33, max_steps=steps)
    assert plan_of(run).epochs == pytest.approx(epochs, abs=1e-12)
    advance(run, 7)
    assert plan_of(run).epochs == pytest.approx(epochs, abs=1e-12)


@pytest.mark.parametrize(
    ("passed_over", "epochs"),
    [([(0, 8, 72)], 3.8), ([(0, 0, 80)], 4.0), ([(1, 0, 80)], 4.0), ([(2, 0, 40)], 3.5), ([(9, 0, 80)], 3.0)],
)
def test_the_epochs_with_skipped_samples(passed_over: list[tuple[int, int, int]], epochs: float) -> None:
    run = make_run(80, max_steps=30)  # epochs of 10 steps
    assert plan_of(run, passed_over=passed_over).epochs == pytest.approx(epochs, abs=1e-12)
    advance(run, 30, passed_over)
    assert run.state.epoch + run.state.position / 80 == pytest.approx(epochs, abs=1e-12)


def test_the_epochs_after_a_change_of_layout() -> None:
    run = make_run(32, max_steps=12)  # epochs of 4 steps
    assert plan_of(run).epochs == 3
    advance(run, 6)
    assert (run.state.epoch, run.state.position) == (1, 16)
    half = make_run(32, batch_size=4, max_steps=12)
    half.state = run.state
    assert plan_of(half).epochs == 2.25  # 4 steps of 4 samples to the end of the second, and 2 more of 8


def test_the_epochs_of_a_stream_without_length_are_not_known() -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.ones(1)

    run = make_run(1, max_steps=3)
    run.train_dataset = Stream()
    assert plan_of(run).epochs == math.inf
    assert plan_of(make_run(1, num_train_epochs=2.5)).epochs == 2.5


@pytest.mark.slow
@relaxed
@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_fractions_of_epochs_are_counted_as_written_and_a_resume_changes_nothing(
    tenths: int, length: int, batch_size: int, accumulation: int, drop_last: bool
) -> None:
    length = max(length, batch_size)
    run = make_run(length, batch_size, accumulation, num_train_epochs=tenths / 10, dataloader_drop_last=drop_last)
    per_epoch = make_train_loader(run, READING).steps_left(0, 0)
    expected = math.ceil(Fraction(tenths, 10) * per_epoch)
    first = plan = plan_of(run)
    while run.state.step < expected:
        assert (plan.last_step, plan.schedule_length, plan.schedule_step) == (expected, expected, run.state.step)
        assert advance(run, 1) == 1
        plan = plan_of(run, (run, first))
    assert (plan.last_step, plan.schedule_length, plan.schedule_step) == (expected, expected, expected)


layouts = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
ranges = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 20)), max_size=3).map(
    lambda found: [(epoch, start, start + size) for epoch, start, size in found]
)


@pytest.mark.slow
@relaxed
@given(st.integers(20, 60), st.lists(layouts, min_size=2, max_size=4), st.integers(5, 30), ranges, st.data())
def test_through_any_chain_of_layouts_the_schedule_ends_with_the_run(
    length: int, chain: list[tuple[int, int, int]], tenths: int, passed_over: Any, data: st.DataObject
) -> None:
    before, state = None, None
    for number, layout in enumerate(chain):
        run = make_run(length, *layout, num_train_epochs=tenths / 10, on_resize="scale")
        run.state = state = state or run.state
        plan = plan_of(run, before, passed_over)
        assert 0 <= plan.schedule_step <= plan.schedule_length
        # A run that always had this layout is there too, but for the steps that the changes cut in two.
        alone = make_run(length, *layout, num_train_epochs=tenths / 10)
        advance(alone, plan.schedule_step - 1, passed_over)
        assert (alone.state.epoch, alone.state.position) <= (state.epoch, state.position)
        if plan.schedule_step < plan.schedule_length:
            advance(alone, 2, passed_over)
            assert (alone.state.epoch, alone.state.position) >= (state.epoch, state.position)
        taken = data.draw(st.integers(0, 10)) if number < len(chain) - 1 else 10_000
        steps = advance(run, taken, passed_over)
        again = plan_of(run, (run, plan), passed_over)
        assert (again.last_step, again.schedule_length, again.schedule_step) == (
            plan.last_step,
            plan.schedule_length,
            plan.schedule_step + steps,
        )
        before = (run, plan)
    assert again.schedule_step == again.schedule_length
    assert state is not None
    assert state.step == again.last_step


@pytest.mark.slow
@relaxed
@given(
    st.integers(20, 60), layouts, st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(5, 30), st.booleans()
)
def test_steps_and_schedule_stay_through_any_number_of_processes(
    length: int, layout: tuple[int, int, int], chain: list[int], tenths: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"num_train_epochs": tenths / 10, "warmup_steps": 3, "dataloader_drop_last": drop_last}
    batch_size, accumulation, full = layout
    assume(not drop_last or length >= batch_size * full)
    run = make_run(length, *layout, **options)
    first = plan = plan_of(run)
    for processes in [*chain, full]:
        before, run = run, make_run(length, batch_size, accumulation, processes, **options)
        run.state = before.state
        plan = plan_of(run, (before, plan))
        assert (plan.last_step, plan.schedule_length, plan.schedule_step) == (
            first.last_step, first.schedule_length, run.state.step
        )  # fmt: skip
        assert plan.scheduled(run.args) is run.args
        loader = make_train_loader(run, READING, saved=plan.state_dict())
        taken = [*loader.micro_batches(run.state.epoch, run.state.position, min(2, plan.last_step - run.state.step))]
        for window in (micro.global_batch for micro in taken if micro.is_last):
            run.state.step, run.state.epoch, run.state.position = run.state.step + 1, window.epoch, window.stop
            if window.closes_epoch:
                run.state.epoch, run.state.position = run.state.epoch + 1, 0
    assert plan.layout == first.layout


def test_another_layout_after_a_resume_changes_only_the_steps_left() -> None:
    run = make_run(64, 8, num_train_epochs=2)
    run.state.step, run.state.position = 8, 32  # with a batch of 4
    plan = plan_of(run)
    assert (plan.last_step, plan.schedule_length, plan.schedule_step) == (8 + 4 + 8, 16, 4)


def test_steps_passed_over_are_none() -> None:
    run = make_run(64, 8, num_train_epochs=2.5)
    plan = plan_of(run, passed_over=[(0, 8, 24), (2, 0, 32), (7, 0, 8)])
    # Two steps are half of what the third epoch has left.
    assert (plan.last_step, plan.schedule_length) == (6 + 8 + 2, 16)


def test_max_steps_comes_first_and_counts_steps_of_any_layout() -> None:
    run = make_run(64, max_steps=30, warmup_steps=10)
    before = (run, plan_of(run))
    half = make_run(64, 4, max_steps=30, warmup_steps=10)
    half.state.step, half.state.epoch, half.state.position = 10, 1, 16
    plan = plan_of(half, before)
    assert (plan.last_step, plan.schedule_length, plan.schedule_step) == (30, 30, 10)
    assert plan.scheduled(half.args) is half.args


def test_more_epochs_than_asked_for_need_no_more_steps() -> None:
    run = make_run(64, num_train_epochs=1)
    run.state.step, run.state.epoch = 24, 3
    plan = plan_of(run)
    assert (plan.last_step, plan.schedule_length, plan.schedule_step) == (24, 8, 8)


def test_many_epochs_are_counted_at_once() -> None:
    assert plan_of(make_run(64, num_train_epochs=1e12)).last_step == 8 * 10**12


SCHEDULE: dict[str, Any] = {"lr_scheduler_type": "warmup_stable_decay"}


def test_step_numbers_mean_the_samples_that_they_meant_when_they_were_given() -> None:
    given: dict[str, Any] = SCHEDULE | {"warmup_steps": 10, "lr_scheduler_kwargs": {"num_decay_steps": 20}}
    given["on_resize"] = "scale"
    first = make_run(640, 8, processes=2, **given)  # of 16 samples
    plan = plan_of(first)
    assert plan.scheduled(first.args) is first.args
    second = make_run(640, 4, processes=1, **given)
    smaller = plan_of(second, (first, plan))
    scheduled = smaller.scheduled(second.args)
    assert (scheduled.warmup_steps, scheduled.lr_scheduler_kwargs) == (40, {"num_decay_steps": 80})
    # One of them given anew means steps of now; the other goes on as it was.
    third = make_run(640, 8, processes=4, **(given | {"lr_scheduler_kwargs": {"num_decay_steps": 12}}))
    larger = plan_of(third, (second, smaller))
    scheduled = larger.scheduled(third.args)
    assert (scheduled.warmup_steps, scheduled.lr_scheduler_kwargs) == (5, {"num_decay_steps": 12})
    last = plan_of(make_run(640, 8, processes=2, **vars_of(third)), (third, larger))
    scheduled = last.scheduled(third.args)
    assert (scheduled.warmup_steps, scheduled.lr_scheduler_kwargs) == (10, {"num_decay_steps": 24})


def vars_of(run: Run) -> dict[str, Any]:
    names = ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs", "on_resize")
    return {name: getattr(run.args, name) for name in names}


def test_a_short_warmup_stays_one_and_a_decay_stays_in_the_run() -> None:
    given: dict[str, Any] = SCHEDULE | {"warmup_ratio": 0.5, "warmup_steps": 1, "num_train_epochs": 1}
    first = make_run(65, 8, **given, lr_scheduler_kwargs={"num_decay_steps": 8})  # 9 steps, of 1 sample in the end
    for batch_size, expected in ((20, (1, 3)), (5, (2, 11))):  # 4 and 13 steps
        second = make_run(65, batch_size, **given, lr_scheduler_kwargs={"num_decay_steps": 8})
        scheduled = plan_of(second, (first, plan_of(first))).scheduled(second.args)
        assert (scheduled.warmup_steps, scheduled.lr_scheduler_kwargs["num_decay_steps"]) == expected


@pytest.mark.parametrize("epochs", [1.0, 2.5])
def test_an_iterable_dataset_with_a_length_is_planned_alike(epochs: float) -> None:
    class Stream:
        def __len__(self) -> int:
            return 64

        def __iter__(self) -> Any:
            return iter([torch.ones(1)] * 64)

    plans = []
    for dataset in ([torch.ones(1)] * 64, Stream()):
        run = make_run(64, 3, 2, 2, num_train_epochs=epochs)
        run.train_dataset = dataset
        run.state.step, run.state.position = 3, 21
        plans.append(plan_of(run, passed_over=[(0, 30, 36)]))
    assert plans[0] == plans[1]

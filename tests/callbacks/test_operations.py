from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.callbacks.operations import Operations
from trainer_kit.profiling import flops
from trainer_kit.run import Run


def row(batch: int = 1) -> int:
    """What the forward pass of `Linear(4, 2)` takes, and as much its backward pass."""
    return 2 * batch * 4 * 2


@pytest.fixture
def make(make_run: Callable[..., Run]) -> Callable[..., tuple[Run, Operations]]:
    def make(model: nn.Module | None = None) -> tuple[Run, Operations]:
        run, operations = make_run(model=model), Operations()
        operations.begin(run)
        return run, operations

    return make


def step(run: Run, operations: Operations, *sizes: int) -> None:
    """A step with batches of so many rows."""
    if operations.due:
        operations.start(run)
    for size in sizes:
        run.batch = run.strategy.to_device({"input": torch.ones(size, 4)})
        with run.ledger.during("forward"):
            run.model(run.batch["input"]).sum().backward()
        if operations._counter is not None:
            operations.note(run)
    operations.stop()


def test_each_shape_is_counted_once(make: Callable[..., tuple[Run, Operations]]) -> None:
    run, operations = make()
    assert operations.due == 1
    step(run, operations, 3, 5, 3)
    for _ in range(10):
        assert operations.due == 0
        step(run, operations, 5, 3)
    assert operations.so_far(run) == flops.Flops(row(11 + 80), row(11 + 80))
    assert operations.unknown == 0


def test_other_shapes_are_taken_in_proportion_and_then_counted(make: Callable[..., tuple[Run, Operations]]) -> None:
    run, operations = make()
    step(run, operations, 3)
    step(run, operations, 6, 7)
    assert operations.so_far(run).forward == row(3 + 6 + 7)
    assert operations.unknown == 2
    operations.expect(operations.unknown)
    step(run, operations, 6)
    step(run, operations, 7)
    step(run, operations, 7)
    assert operations.so_far(run).forward == row(3 + 6 + 7 + 6 + 7 + 7)
    assert operations.due == operations.unknown == 0


def test_batches_before_a_counted_step_and_before_the_training(make: Callable[..., tuple[Run, Operations]]) -> None:
    run, operations = make()
    step(run, operations, 3)
    step(run, operations, 3)
    operations.expect(1)
    step(run, operations, 3)
    assert operations.so_far(run).forward == row(9)
    operations.begin(run)  # of another training
    step(run, operations, 3)
    assert operations.so_far(run).forward == row(3)


def test_no_more_than_a_few_steps_are_counted(make: Callable[..., tuple[Run, Operations]]) -> None:
    run, operations = make()
    counted = 0
    for size in range(1, 30):
        counted += operations.due > 0
        step(run, operations, size)
        operations.so_far(run)
        operations.expect(operations.unknown)
    assert counted == 8
    assert operations.so_far(run).forward == row(sum(range(1, 30)))


def test_the_nearest_shape_is_what_others_are_compared_with(make: Callable[..., tuple[Run, Operations]]) -> None:
    """Where each row has a part that grows with the square of the length, as attention has."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ (input * self.weight).T

    run, operations = make(Square())
    step(run, operations, 10, 100)
    step(run, operations, 90)
    done = operations.so_far(run).forward
    assert done == 2 * 4 * (10**2 + 100**2) + round(2 * 4 * 100**2 * 0.9)  # 100 rows are nearer than 10


def test_batches_beside_the_step_do_not_count(make: Callable[..., tuple[Run, Operations]]) -> None:
    run, operations = make()
    operations.start(run)
    run.model(run.strategy.to_device({"input": torch.ones(2, 4)})["input"])  # a look at the model
    run.batch = run.strategy.to_device({"input": torch.ones(3, 4)})
    run.model(run.batch["input"])  # another one
    with run.ledger.during("forward"):
        run.model(run.batch["input"]).sum().backward()
    operations.note(run)
    operations.stop()
    step(run, operations, 3)
    with torch.no_grad():
        run.strategy.to_device({"input": torch.ones(50, 4)})  # an evaluation
    assert operations.so_far(run) == flops.Flops(row(6), row(6))


def test_freezing_is_counted_anew(make: Callable[..., tuple[Run, Operations]]) -> None:
    run, operations = make(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    step(run, operations, 1, 2)
    before = operations.so_far(run)
    assert operations.unknown == 0
    run.model[0].requires_grad_(False)  # type: ignore[index]
    operations.so_far(run)
    assert operations.unknown == 1
    operations.expect(1)
    for size in (1, 1, 2):  # the last one is taken in proportion
        step(run, operations, size)
    after = operations.so_far(run).minus(before)
    assert after.forward == 4 / 3 * before.forward
    assert after.backward == 4 * 2 * 4 * 2  # the gradient of the second layer's weights alone


def test_what_cannot_be_counted_says_why(
    make: Callable[..., tuple[Run, Operations]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> tuple[int, int]:
        raise ValueError("no shape")

    run, operations = make()
    monkeypatch.setitem(flops._FORMULAS, torch.ops.aten.addmm, fail)
    step(run, operations, 1)
    assert operations.reason == "aten.addmm.default cannot be counted (ValueError: no shape)"


def test_a_compiled_model_is_counted_on_fake_tensors(make_run: Callable[..., Run]) -> None:
    run, operations = make_run(), Operations()
    run.model.compile(backend="eager")
    run.strategy.to_device({"input": torch.ones(3, 4)})  # in another training
    operations.begin(run)
    assert operations.due == 0  # torch would compile the counted step and the others, each for itself
    run.batch = run.strategy.to_device({"input": torch.ones(3, 4)})
    assert operations.so_far(run) == flops.Flops(row(3), row(3))
    run.strategy.to_device({"input": torch.ones(6, 4)})
    assert operations.so_far(run) == flops.Flops(row(9), row(9))


def test_a_compiled_model_that_looks_at_values_says_why(make_run: Callable[..., Run]) -> None:
    class Looks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * (2 if input.sum() > 0 else 1)

    run, operations = make_run(model=Looks(4, 2)), Operations()
    run.model.compile(backend="eager")
    operations.begin(run)
    run.batch = run.strategy.to_device({"input": torch.ones(3, 4)})
    assert operations.so_far(run) == flops.Flops()
    assert str(operations.reason).startswith("the model is compiled, and does not run on fake tensors (DataDependent")

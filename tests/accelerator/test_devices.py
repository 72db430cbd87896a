"""A process that drives several devices, where computations are recorded first: a stand-in for XLA on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from kit.static_shapes import OnFour
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from trainer_kit import SingleDevice, Strategy
from trainer_kit.accelerator import Accelerator, PreparedLoader, set_seed
from trainer_kit.accelerator import accelerator as core
from trainer_kit.accelerator.concat import joined
from trainer_kit.accelerator.wrappers import AccumulationState
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.device_info import DeviceInfo


class OfFour(SingleDevice):
    """One of four processes, which says nothing to the others."""

    def __init__(self, rank: int) -> None:
        super().__init__("cpu")
        self.collectives = Collectives(rank, world_size=4)


class Rows(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.tensor([index]), "name": f"row {index}"}


class RowStream(Rows, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self.length))


class WholeBatches(Rows):
    """Each item is a batch of three rows."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.arange(3)[:, None] + 3 * index, "name": [f"row {3 * index + n}" for n in range(3)]}


def accelerator_with(strategy: Strategy, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Accelerator:
    monkeypatch.setattr(core, "choose_strategy", lambda *_, **__: strategy)
    return Accelerator(**options)


def batches(strategy: Strategy, loader: DataLoader[Any], splits: bool) -> tuple[int, list[tuple[list[int], int, bool]]]:
    """Length of the loader, and of each batch of two passes its rows, how many are no repeats, and if it is the last.

    Names come with the rows.
    """
    prepared = PreparedLoader(loader, strategy, AccumulationState(strategy), 7, splits)
    found = []
    for batch in chain(prepared, prepared):
        rows = batch["row"].flatten().tolist()
        assert batch["name"] == [f"row {row}" for row in rows]
        assert prepared.rows == len(rows)
        found.append((rows, prepared.real, prepared.gave_last))
    return len(prepared), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "options", "splits"),
    [
        (Rows(24), {"batch_size": 3, "shuffle": True}, False),
        (Rows(29), {"batch_size": 3, "shuffle": True}, False),
        (Rows(2), {"batch_size": 3}, False),
        (Rows(29), {"batch_size": 3, "drop_last": True}, False),
        (Rows(29), {"batch_size": 3, "num_workers": 2}, False),
        (Rows(29), {"batch_size": 8}, True),
        (Rows(29), {"batch_sampler": BatchSampler(RandomSampler(range(29)), 3, drop_last=False)}, False),
        (WholeBatches(6), {"batch_size": None}, False),
    ],
)
def test_a_batch_has_the_samples_of_four_processes(dataset: Any, options: dict[str, Any], splits: bool) -> None:
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    length, found = batches(OnFour(), loader, splits)
    (first, of_first), *others = (batches(OfFour(rank), loader, splits) for rank in range(4))
    assert length == first
    for number, (rows, real, last) in enumerate(found):
        parts = [of_first[number], *(of_other[number] for _, of_other in others)]
        assert rows == [row for part, _, _ in parts for row in part]
        assert real == sum(real_part for _, real_part, _ in parts)
        assert {last} == {last_part for _, _, last_part in parts}
    seen = sorted(row for rows, real, _ in found[:length] for row in rows[:real])
    samples = 24 if options.get("drop_last") else 18 if isinstance(dataset, WholeBatches) else len(dataset)
    assert len(set(seen)) == len(seen) == samples


def test_batches_of_a_stream_are_joined() -> None:
    _, found = batches(OnFour(), DataLoader(RowStream(13), batch_size=2), False)
    assert found[:2] == [(list(range(8)), 8, False), ([8, 9, 10, 11, 12, 0, 1, 2], 5, True)]
    assert found[2:] == found[:2]


def test_batches_that_cannot_be_joined() -> None:
    point = (torch.zeros(2), {"id": 3, "of": None, "texts": ["a", "b"], "time": torch.tensor(1.0)})
    one = joined([point])
    assert one is point
    tensor, others = joined([point, (torch.ones(1), {**point[1], "id": 4})])
    assert tensor.tolist() == [0, 0, 1]
    assert others.pop("time").tolist() == [1, 1]
    assert others == {"id": [3, 4], "of": None, "texts": ["a", "b", "a", "b"]}
    with pytest.raises(ValueError, match=r"of 2 devices are one batch, but their samples have the shapes \(2,\) and"):
        joined([torch.zeros(1, 2), torch.zeros(1, 3)])


def test_split_batches_names_the_devices() -> None:
    strategy = OnFour()
    with pytest.raises(ValueError, match="cannot split batches of 6 over 4 devices"):
        PreparedLoader(DataLoader(Rows(8), batch_size=6), strategy, AccumulationState(strategy), 0, split_batches=True)


def test_gather_for_metrics_leaves_out_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerator_with(OnFour(), monkeypatch)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(21)), batch_size=2))
    assert (len(loader), loader.total_batch_size) == (3, 8)
    rows, by_device, objects = [], [], []
    for (batch,) in loader:
        assert len(batch) == 8
        rows += accelerator.gather_for_metrics(batch).tolist()
        by_device.append(len(accelerator.gather_for_metrics(batch.float().mean().repeat(2))))
        objects += accelerator.gather_for_metrics([str(row) for row in batch.tolist()])
    assert rows == list(range(21))
    assert objects == [str(row) for row in range(21)]
    assert by_device == [2, 2, 2]  # 5 of 8 rows are no repeats


# Where the device is let begin


class Recorded(SingleDevice):
    """Writes down what is done."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.events: list[str] = []
        self.device_info = RecordedInfo(self)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.events.append("step")
        return super().step(optimizer, *args, **kwargs)


class RecordedInfo(DeviceInfo):
    def __init__(self, strategy: Recorded) -> None:
        super().__init__(strategy.device)
        self.events = strategy.events

    def mark_step(self) -> None:
        self.events.append("begin")


class Noting(nn.Linear):
    def __init__(self, events: list[str]) -> None:
        super().__init__(2, 1)
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("forward")
        return super().forward(x)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (("forward", "backward", "step", "clear"), ["forward", "step", "cleared", "begin", "begin"]),
        (("clear", "forward", "backward", "step"), ["cleared", "forward", "step", "begin", "begin"]),
        (("forward", "clear", "backward", "step"), ["forward", "cleared", "step", "begin", "begin"]),
        (("forward", "backward", "step"), ["forward", "step", "begin"]),
    ],
)
@pytest.mark.parametrize("reads_a_loader", [True, False])
def test_a_step_is_one_computation_in_whatever_order_a_loop_has(
    order: tuple[str, ...], expected: list[str], reads_a_loader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = Recorded()
    accelerator = accelerator_with(strategy, monkeypatch)
    model = Noting(strategy.events)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Iterable[Any] = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    clear = optimizer.optimizer.zero_grad
    monkeypatch.setattr(optimizer.optimizer, "zero_grad", lambda _: (strategy.events.append("cleared"), clear()))
    if reads_a_loader:
        data = accelerator.prepare(data)
    strategy.events.clear()
    for (batch,) in data:
        loss = None
        for action in order:
            if action == "forward":
                loss = model(batch).mean()
            elif action == "backward":
                accelerator.backward(loss)
            else:
                optimizer.step() if action == "step" else optimizer.zero_grad()
    if reads_a_loader:
        assert strategy.events == ["begin", *expected, *expected]
    else:
        once = [event for event in expected if event != "begin"]
        once.insert(once.index("step") + 1, "begin")
        assert strategy.events == once * 2


def test_saving_begins_with_what_is_recorded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = Recorded()
    accelerator = accelerator_with(strategy, monkeypatch)
    model = accelerator.prepare(nn.Linear(1, 1))
    model_state, restored = strategy.model_state, strategy.device_info.set_rng_state
    monkeypatch.setattr(strategy, "model_state", lambda each: (strategy.events.append("read"), model_state(each))[1])
    monkeypatch.setattr(
        strategy.device_info, "set_rng_state", lambda state: (strategy.events.append("write"), restored(state))
    )
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    accelerator.load_state(tmp_path / "state")
    assert strategy.events == ["begin", "read", "begin", "read", "write", "begin"]


# Where moving a model makes other parameters


class Moving(SingleDevice):
    """Replaces parameters, as devices do whose tensors are of another kind."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.moved: dict[Any, Any] = {}

    def prepare(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self.moved[parameter] = nn.Parameter(parameter.detach().clone())
                setattr(module, name, self.moved[parameter])
        return super().prepare(model)

    def prepared_parameters(self, parameters: Iterable[Any]) -> list[torch.Tensor]:
        return [self.moved.get(parameter, parameter) for parameter in parameters]

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups:
            group["params"] = self.prepared_parameters(group["params"])
        return optimizer


@pytest.mark.parametrize("at_once", [True, False])
def test_an_optimizer_and_a_list_made_before_the_model_is_moved(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerator_with(Moving(), monkeypatch)
    set_seed(0)
    model = nn.Linear(2, 1)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    if at_once:
        optimizer, model = accelerator.prepare(optimizer, model)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    before = model.weight.detach().clone()
    assert model.weight is not parameters[0]
    accelerator.backward(1000 * model(torch.ones(1, 2)).sum())
    norm = accelerator.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    assert float(norm) == pytest.approx(1000 * 3**0.5)
    assert (before - model.weight).flatten().tolist() == pytest.approx([0.5 / 3**0.5] * 2, rel=1e-4)

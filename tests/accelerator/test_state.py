"""`PartialState`, `AcceleratorState` and `GradientState` of one process and of two."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch.utils.data import BatchSampler

from trainer_kit.accelerator import Accelerator, AcceleratorState, GradientState, PartialState
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin
from trainer_kit.accelerator.utils.enums import DistributedType
from trainer_kit.errors import DistributedOperationException


@pytest.fixture(autouse=True)
def fresh_states() -> None:
    PartialState._reset_state()
    GradientState._reset_state()


def test_all_objects_share_the_facts() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.device) == (1, 0, torch.device("cpu"))
    assert not state.use_distributed
    assert state.backend is None
    assert PartialState().strategy is state.strategy
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert state.strategy is accelerator.strategy
    assert accelerator.state.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    assert accelerator.state.deepspeed_plugin is None
    accelerator.state.distributed_type = DistributedType.FSDP
    assert PartialState().distributed_type is DistributedType.FSDP
    assert Accelerator(cpu=True).state.distributed_type is DistributedType.NO
    with pytest.raises(ValueError, match=r"mixed_precision='fp16' differs from that of the Accelerator, 'no'; give"):
        AcceleratorState(mixed_precision="fp16")
    assert pickle.loads(pickle.dumps(state)).__dict__ is state.__dict__


def test_a_second_accelerator_leaves_the_first_one_as_it_is() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    assert (first.state.mixed_precision, first.mixed_precision) == ("bf16", "bf16")
    assert (second.state.mixed_precision, AcceleratorState().mixed_precision) == ("no", "no")


def test_the_position_within_a_step() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(10), batch_size=4))
    state = GradientState()
    assert (state.num_steps, state.remainder, state.active_dataloader) == (2, -1, None)
    seen = []
    for _ in loader:
        assert state.active_dataloader is loader
        assert state.in_dataloader
        with accelerator.accumulate():
            seen.append((state.sync_gradients, state.end_of_dataloader, state.remainder))
    assert seen == [(False, False, 2), (True, False, 2), (True, True, 2)]
    assert state.plugin_kwargs == {"num_steps": 2}
    accelerator.gradient_accumulation_steps = 3
    accelerator.sync_gradients = False
    assert (GradientState().num_steps, GradientState().sync_gradients) == (3, False)
    assert (
        GradientState(GradientAccumulationPlugin(num_steps=5)).num_steps == accelerator.gradient_accumulation_steps == 5
    )


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (range(10), {"batch_size": 4}, 2),
        (range(8), {"batch_size": 4}, 0),
        (range(10), {"batch_size": 4, "drop_last": True}, -1),
        (range(10), {"batch_sampler": BatchSampler(range(10), 4, drop_last=True)}, -1),
        (range(10), {"batch_sampler": [[0, 1, 2], [3, 4]]}, -1),
        (range(10), {"batch_size": None}, -1),
        (Stream(), {"batch_size": 4}, -1),
    ],
)
def test_the_remainder_of_the_last_batch(data: Any, options: dict[str, Any], expected: int) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(torch.utils.data.DataLoader(data, **options)):
        assert accelerator.gradient_state.remainder == expected


@pytest.mark.parametrize("inputs", [[1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3]), {"a": [1, 2], "b": "other"}])
def test_one_process_gets_all(inputs: Any) -> None:
    with PartialState(cpu=True).split_between_processes(inputs) as part:
        assert part is inputs


_NESTED = {"a": {"b": [1, 2, 3], "c": {"d": (4, 5, 6)}}, "e": [7, 8, 9]}


class Rows(list[int]):
    """Looks like a dataset of the package datasets."""

    column_names = ("number",)

    def select(self, rows: list[int]) -> list[int]:
        return [self[row] for row in rows]


def parts(apply_padding: bool) -> list[Any]:
    PartialState._reset_state()  # of an earlier call in this process
    state, found = PartialState(cpu=True), []
    pairs, few = torch.arange(6).reshape(3, 2), {"a": ("x",), "b": torch.ones(1, 2), "c": Rows([5])}
    for inputs in ([1, 2, 3], (1, 2, 3), {"a": ["x", "y", "z"], "b": pairs}, [1], [], _NESTED, few):
        with state.split_between_processes(inputs, apply_padding=apply_padding) as part:  # type: ignore[arg-type]
            found.append(part)
    return found


@pytest.mark.distributed
def test_two_processes_get_parts() -> None:
    first, second = on_ranks(2, parts, False)
    assert first[:2] == [[1, 2], (1, 2)]
    assert second[:2] == [[3], (3,)]
    assert (first[2]["a"], second[2]["a"]) == (["x", "y"], ["z"])
    assert torch.equal(torch.cat([first[2]["b"], second[2]["b"]]), torch.arange(6).reshape(3, 2))
    assert (first[3:5], second[3:5]) == ([[1], []], [[], []])
    assert first[5] == {"a": {"b": [1, 2], "c": {"d": (4, 5)}}, "e": [7, 8]}
    assert second[5] == {"a": {"b": [3], "c": {"d": (6,)}}, "e": [9]}
    assert first[6]["c"] == [5]
    assert (second[6]["a"], second[6]["b"].shape, second[6]["c"]) == ((), (0, 2), [])
    first, second = on_ranks(2, parts, True)
    assert second[:2] == [[3, 3], (3, 3)]
    assert second[2]["b"].tolist() == [[4, 5], [4, 5]]
    assert second[3:5] == [[1], []]
    assert (second[6]["a"], second[6]["b"].tolist(), second[6]["c"]) == (("x",), [[1.0, 1.0]], [5])
    assert second[5] == {"a": {"b": [3, 3], "c": {"d": (6, 6)}}, "e": [9, 9]}


def unequal() -> list[str]:
    PartialState._reset_state()
    state, messages = PartialState(cpu=True), []
    assert state.backend == "gloo"
    state.debug = True
    tensor = torch.ones(1 + state.process_index, *([1] * state.process_index))
    for operation in (state.reduce, state.broadcast, state.pad_across_processes):
        try:
            operation(tensor)
        except DistributedOperationException as error:
            messages.append(str(error))
    state.debug = False
    return messages


@pytest.mark.distributed
def test_debug_mode_compares_shapes() -> None:
    first, second = on_ranks(2, unequal)
    assert first == second
    assert [message.partition("()")[0] for message in first] == ["reduce", "broadcast", "pad_across_processes"]
    assert first[0].endswith("by rank: [[[1]], [[2, 1]]]; give all of them the same shapes")

from __future__ import annotations

import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer_kit.utils.pytree import (
    flatten_state,
    map_tensors,
    move,
    plain_values,
    tensor_names,
    tensors,
    unflatten_state,
)

Point = namedtuple("Point", "x y")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16]
NUMPY_DTYPES = ["<f4", ">f4", "<f2", "|b1", "<u2", "<u4", "<u8", "<c16", "<M8[ns]", "<m8[s]", "<U3", "|S2", ">i8"]


def same(left: Any, right: Any) -> bool:
    """Equal in value and type; tensors, arrays and floats bit for bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.reshape(-1).view(torch.uint8).tolist() == right.reshape(-1).view(torch.uint8).tolist()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return all(same(a, b) and same(x, y) for (a, x), (b, y) in zip(left.items(), right.items(), strict=True))
    if isinstance(left, (list, tuple, deque)):
        return (
            getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return bool(left == right)


def through_json(tree: Any) -> Any:
    json_tree, found = flatten_state(tree)
    return unflatten_state(json.loads(json.dumps(json_tree, allow_nan=False)), found)


def raw_tensors() -> st.SearchStrategy[torch.Tensor]:
    def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        high = 2 if dtype == torch.bool else 256
        generator = torch.Generator().manual_seed(seed)
        size = math.prod(shape) * dtype.itemsize
        return torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)

    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    return st.builds(make, st.sampled_from(DTYPES), shapes, st.integers(0, 9))


def raw_arrays() -> st.SearchStrategy[Any]:
    def make(dtype: str, shape: tuple[int, ...], content: list[int]) -> Any:
        return np.resize(np.array(content), shape).astype(dtype)

    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    return st.builds(make, st.sampled_from(NUMPY_DTYPES), shapes, st.lists(st.integers(0, 9), min_size=1, max_size=9))


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**60, 2**200),
    st.floats(allow_nan=False),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0]),
    st.text(),
    st.sampled_from(["__kind__", "__metadata__", "tensor", "", "a.b", "\ud800"]),
    st.binary(max_size=4),
)
keys = st.recursive(plain, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
leaves = st.one_of(
    plain,
    raw_tensors(),
    raw_arrays(),
    raw_arrays().filter(lambda array: array.size > 0).map(lambda array: array.flat[0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), Path("a/b")]),
    st.sampled_from([torch.Size([2, 3]), {1, 2}, frozenset({"a", None}), Counter("aab"), OrderedDict(b=1, a=2)]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(st.lists(inner, max_size=3), st.none() | st.integers(3, 5)).map(lambda made: deque(*made)),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.sampled_from(["__kind__", "value", "a", "a.b"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(trees)
def test_split_and_join_give_the_tree_back(tree: Any) -> None:
    assert same(through_json(tree), tree)


@pytest.mark.parametrize("kind", ["tensor", "dict", "int", "ndarray", "unknown"])
def test_a_users_dict_that_looks_like_a_tag_stays_a_dict(kind: str) -> None:
    tree = {"__kind__": kind, "value": "0x10", "inner": [{"__kind__": kind}]}
    assert through_json(tree) == tree


def test_tensors_are_named_by_their_place_and_never_collide() -> None:
    tree = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "a.b#1": torch.ones(2), "__metadata__": torch.ones(3)}
    json_tree, found = flatten_state(tree)
    assert len(found) == 4
    assert "a.b" in found
    assert "__metadata__" not in found
    assert same(unflatten_state(json_tree, found), tree)


def test_named_tuples_come_back_as_tuples_and_parameters_as_tensors() -> None:
    loaded = through_json([Point(1, 2.0), torch.nn.Parameter(torch.ones(2))])
    assert loaded[0] == (1, 2.0)
    assert type(loaded[0]) is tuple
    assert type(loaded[1]) is torch.Tensor
    assert not loaded[1].requires_grad


def test_tensors_are_not_copied_and_arrays_are() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    _, found = flatten_state([tensor, array])
    array[0] = 5
    assert found["0"].data_ptr() == tensor.data_ptr()
    assert found["1"].tolist() == [1, 1]


def test_integers_of_any_size() -> None:
    tree = [10**5000, -(2**63), 2**63, -(2**128) + 1]
    assert through_json(tree) == tree


def test_the_states_of_the_generators_survive() -> None:
    numpy_generator = np.random.Generator(np.random.PCG64(3))
    tree = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": numpy_generator.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    loaded = through_json(tree)
    assert same(loaded, tree)
    expected = numpy_generator.random(3).tolist()
    numpy_generator.bit_generator.state = loaded["generator"]
    assert numpy_generator.random(3).tolist() == expected
    random.setstate(loaded["random"])
    np.random.set_state(loaded["numpy"])


SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_the_states_of_torchs_schedules_survive(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    def run(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    first_schedule = make(first)
    run(first_schedule, first, 2)
    states = through_json([first.state_dict(), first_schedule.state_dict()])
    second = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    second_schedule = make(second)
    second.load_state_dict(states[0])
    second_schedule.load_state_dict(states[1])
    assert run(second_schedule, second, 4) == run(first_schedule, first, 4)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("tree", "place", "kind"),
    [
        ({"ema": [0, 1, 2, object()]}, r"state\['ema'\]\[3\]", "builtins.object"),
        ({("a", 1): {2: print}}, r"state\[\('a', 1\)\]\[2\]", "builtin_function_or_method"),
        ([defaultdict(list)], r"state\[0\]", "collections.defaultdict"),
        ([np.array([object()])], r"state\[0\]", "numpy.ndarray"),
        (np.zeros(2, dtype=[("a", "f4")]), "state", "numpy.ndarray"),
        ((Color.RED,), r"state\[0\]", "Color"),
        ([1j], r"state\[0\]", "builtins.complex"),
        ({torch.ones(1): 1}, "state", "tensor"),
    ],
)
def test_anything_else_is_refused_by_its_place_and_type(tree: Any, place: str, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^{place} (is of type|has a key).*{kind}"):
        flatten_state(tree)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ValueError, match="contain itself"):
        flatten_state(tree)


@pytest.mark.parametrize(
    "json_tree",
    [
        {"__kind__": "tensor", "value": "not there"},
        {"__kind__": "tensor"},
        {"__kind__": "function", "value": "os.system"},
        {"__kind__": "dtype", "value": "torch.load"},
        {"__kind__": "device", "value": "nowhere"},
        {"__kind__": "numpy", "value": "00" * 8, "dtype": "|O"},
        {"__kind__": "ndarray", "value": "bytes", "dtype": "|O", "shape": [1]},
        {"__kind__": "ndarray", "value": "bytes", "dtype": "<U1", "shape": [1000]},
        {"__kind__": "ndarray", "value": "bytes", "dtype": "<f4"},
        {"__kind__": "int", "value": 3},
        {"__kind__": "dict", "value": [[[], 1]]},
        {"__kind__": ["dict"], "value": []},
        {"__kind__": "deque", "value": [1, 2], "maxlen": 1},
        {"__kind__": "deque", "value": [1], "maxlen": "2"},
        {"__kind__": "deque", "value": [1]},
    ],
)
def test_join_refuses_what_split_did_not_make(json_tree: Any) -> None:
    with pytest.raises(ValueError, match="no state that flatten_state"):
        unflatten_state(json_tree, {"bytes": torch.zeros(8, dtype=torch.uint8)})


def test_plain_values_come_with_their_place() -> None:
    groups = [{"lr": math.inf, "betas": (0.9, 0.99), "params": [0, 1]}]
    state = {"state": {0: {"exp_avg": torch.zeros(2), "step": 3}}, "groups": groups, "empty": {}, "array": np.zeros(2)}
    assert dict(plain_values(flatten_state(state)[0])) == {
        "state.0.step": 3,
        "groups.0.lr": math.inf,
        "groups.0.betas": (0.9, 0.99),
        "groups.0.params": [0, 1],
        "empty": {},
    }
    assert list(plain_values(flatten_state(7)[0])) == [("", 7)]
    with pytest.raises(ValueError, match="no state that flatten_state"):
        list(plain_values({"a": [{"__kind__": "function", "value": "os.system"}]}))


def test_map_tensors_keeps_containers() -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, {"a": [torch.zeros(1)], "b": Point(torch.ones(1), "x")})
    assert mapped["a"][0].item() == 1
    assert type(mapped["b"]) is Point
    assert (mapped["b"].x.item(), mapped["b"].y) == (2, "x")


def test_a_packed_sequence_moves_without_the_sizes_of_its_batches() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = move({"x": [packed]}, torch.device("meta"))["x"][0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == [2, 2, 1]


def test_tensors_finds_all_of_them_depth_first() -> None:
    found = tensors({"a": [torch.tensor(1), 2], "b": (torch.tensor(3), {"c": torch.tensor(4)})})
    assert [tensor.item() for tensor in found] == [1, 3, 4]


ORDERED_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.uint16, torch.complex128]


def in_some_order(shape: list[int], order: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in this order."""
    places = [place for place in order if place < len(shape)]
    values = torch.arange(math.prod(shape)).to(torch.uint8).repeat_interleave(dtype.itemsize).clamp_(max=1).view(dtype)
    lying = values.reshape([shape[place] for place in places])
    return lying.permute([places.index(place) for place in range(len(shape))])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=4), st.permutations(range(4)), st.sampled_from(ORDERED_DTYPES))
def test_tensors_come_back_in_their_order_in_memory(shape: list[int], order: list[int], dtype: torch.dtype) -> None:
    tensor = in_some_order(shape, order, dtype)
    tree, found = flatten_state({"tensor": tensor})
    assert unflatten_state(json.loads(json.dumps(tree)), found)["tensor"].data_ptr() == tensor.data_ptr()
    row_major = {name: each.contiguous() for name, each in found.items()}  # as a file holds them
    back = unflatten_state(json.loads(json.dumps(tree)), row_major)["tensor"]
    assert back.stride() == (tensor.stride() if tensor.numel() else tensor.contiguous().stride())
    assert same(back, tensor)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=4), st.permutations(range(4)), st.booleans())
def test_arrays_come_back_in_their_order_in_memory(shape: list[int], order: list[int], flipped: bool) -> None:
    array = in_some_order(shape, order, torch.float32).numpy()
    array = np.flip(array) if flipped else array
    tree, found = flatten_state(array)
    back = unflatten_state(json.loads(json.dumps(tree)), {name: each.contiguous() for name, each in found.items()})
    assert np.array_equal(back, array)
    assert back.strides == np.array(array, order="K").strides


def test_a_tensor_with_gaps_comes_back_as_its_copy_lies() -> None:
    tensor = torch.arange(24.0).reshape(4, 6).t()[::2]
    tree, found = flatten_state([tensor, tensor.clone()])
    first, second = unflatten_state(tree, {name: each.contiguous() for name, each in found.items()})
    assert first.stride() == second.stride() == tensor.clone().stride() == (1, 3)
    assert torch.equal(first, tensor)


def test_tied_tensors_in_another_order_stay_tied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    tree, found = flatten_state({"one": tensor, "other": tensor})
    held = tensor.contiguous()
    back = unflatten_state(tree, dict.fromkeys(found, held))
    assert back["one"] is back["other"]
    assert back["one"].stride() == (1, 3)


@pytest.mark.parametrize(
    "strides", [[3, 3], [0, 1], [1], [1, 2, 3], [2, 1], [-1, 3], [True, 3], ["1", 3], "13", 1, None, [3, 2**63], [2, 2]]
)
def test_strides_that_fit_no_tensor_are_refused(strides: Any) -> None:
    entry = {"__kind__": "tensor", "value": "x", "strides": strides}
    with pytest.raises(ValueError, match="this is no state that flatten_state"):
        unflatten_state(entry, {"x": torch.zeros(2, 3)})


def test_strides_that_overlap_in_as_much_memory_are_refused() -> None:
    entry = {"__kind__": "tensor", "value": "x", "strides": [2, 2]}
    with pytest.raises(ValueError, match=r"the strides \[2, 2\] do not fit the shape \[3, 3\]"):
        unflatten_state(entry, {"x": torch.zeros(3, 3)})


def test_tensors_are_named_by_their_place() -> None:
    first, second = torch.ones(2), torch.ones(3)
    state = {"state": {0: {"a b": first}, "0": {"a b": second}}, "list": [1, (second,)], "array": np.ones(2), "n": 3}
    tree, found = flatten_state(state)
    names = dict(tensor_names(json.loads(json.dumps(tree))))
    assert names == {
        ("state", 0, "a b"): "state.0.a_b",
        ("state", "0", "a b"): "state.0.a_b#1",
        ("list", 1, 0): "list.1.0",
    }
    assert {name: found[name].numel() for name in names.values()} == {
        "state.0.a_b": 2, "state.0.a_b#1": 3, "list.1.0": 3
    }  # fmt: skip
    with pytest.raises(ValueError, match="this is no state"):
        list(tensor_names({"__kind__": "dict"}))


class Fielded(list[Any]):
    _fields = ("x", "y")


def test_a_list_with_fields_is_no_named_tuple() -> None:
    moved = move(Fielded([torch.zeros(2), torch.ones(2)]), torch.device("meta"))
    assert type(moved) is Fielded
    assert [each.device.type for each in moved] == ["meta", "meta"]

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.far_info import FarInfo
from torch import nn
from transformers import BatchEncoding

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.precision import Precision


def make_strategy(mode: str = "no", reads_freely: bool = True) -> Strategy:
    strategy = Strategy(Precision(mode))
    if not reads_freely:
        strategy.device_info = FarInfo(strategy.device)
    strategy.setup()
    return strategy


def graded(sizes: list[float], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters whose gradients are as large as given."""
    torch.manual_seed(0)
    parameters = []
    for size in sizes:
        parameter = nn.Parameter(torch.randn(3, 2, dtype=dtype))
        parameter.grad = torch.randn(3, 2, dtype=dtype) * size
        parameters.append(parameter)
    return parameters


def grads(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


sizes = st.lists(st.floats(0, 50, width=32), min_size=1, max_size=5)


@settings(max_examples=50)
@given(sizes, st.floats(0.01, 20))
def test_clipping_is_torchs(given_sizes: list[float], max_norm: float) -> None:
    ours, theirs = graded(given_sizes), graded(given_sizes)
    norms = make_strategy().step(torch.optim.SGD(ours, lr=0.0), max_norm=max_norm)
    total = nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norms is not None
    torch.testing.assert_close(norms.total, total)
    torch.testing.assert_close(norms.each, torch.stack([g.norm() for g in grads(graded(given_sizes))]))
    torch.testing.assert_close(grads(ours), grads(theirs))


@settings(max_examples=30)
@given(sizes, st.floats(0.01, 20), st.sampled_from([None, 0.0, 1.0]))
def test_values_are_clipped_after_the_norm(given_sizes: list[float], max_value: float, max_norm: float | None) -> None:
    ours, theirs = graded(given_sizes), graded(given_sizes)
    make_strategy().step(torch.optim.SGD(ours, lr=0.0), max_norm=max_norm, max_value=max_value)
    if max_norm:
        nn.utils.clip_grad_norm_(theirs, max_norm)
    nn.utils.clip_grad_value_(theirs, max_value)
    torch.testing.assert_close(grads(ours), grads(theirs))


def test_nothing_asked_for_leaves_gradients_as_they_are() -> None:
    parameters = graded([100.0, 3.0])
    before = [gradient.clone() for gradient in grads(parameters)]
    assert make_strategy().step(torch.optim.SGD(parameters, lr=0.1)) is None
    assert make_strategy().step(torch.optim.SGD(parameters, lr=0.1), max_norm=0.0, max_value=0.0) is None
    norms = make_strategy().step(torch.optim.SGD(parameters, lr=0.1), nonfinite="stop")
    assert norms is not None
    assert all(torch.equal(one, other) for one, other in zip(grads(parameters), before, strict=True))


def test_parameters_without_a_gradient_are_left_out() -> None:
    parameters = [*graded([1.0, 2.0]), nn.Parameter(torch.ones(2))]
    norms = make_strategy().step(torch.optim.SGD(parameters, lr=0.1), max_norm=1.0)
    assert norms is not None
    assert norms.each.shape == (2,)
    assert make_strategy().step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), max_norm=1.0) is None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd fused, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def snapshot(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[list[Any], Any]:
    return [parameter.detach().clone() for parameter in parameters], copy.deepcopy(optimizer.state_dict()["state"])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("reads_freely", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipping_leaves_weights_and_optimizer_bit_for_bit(
    name: str, reads_freely: bool, max_norm: float | None, bad: float
) -> None:
    parameters = graded([1.0, 2.0, 3.0])
    optimizer, strategy = OPTIMIZERS[name](parameters), make_strategy(reads_freely=reads_freely)
    strategy.step(optimizer, max_norm, nonfinite="skip")
    weights, state = snapshot(parameters, optimizer)
    good = [gradient.clone() for gradient in grads(parameters)]
    grads(parameters)[1][2, 1] = bad
    norms = strategy.step(optimizer, max_norm, nonfinite="skip")
    assert norms is not None
    assert not torch.isfinite(norms.total)
    assert torch.isfinite(norms.each).tolist() == [True, False, True]
    after_weights, after_state = snapshot(parameters, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(after_weights, weights, strict=True))
    assert {key: same(value, state[key]) for key, value in after_state.items()} == dict.fromkeys(state, True)
    for parameter, gradient in zip(parameters, good, strict=True):
        parameter.grad = gradient.clone()
    strategy.step(optimizer, max_norm, nonfinite="skip")  # and the next one is taken
    assert not any(torch.equal(one, other) for one, other in zip(parameters, weights, strict=True))
    assert not hasattr(optimizer, "found_inf")


def test_skipping_changes_no_step_that_is_finite() -> None:
    for name, make in OPTIMIZERS.items():
        ours, theirs = graded([1.0, 2.0]), graded([1.0, 2.0])
        one, other = make(ours), make(theirs)
        for _ in range(3):
            make_strategy().step(one, nonfinite="skip")
            make_strategy().step(other)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), name


@pytest.mark.parametrize("nonfinite", ["ignore", "skip", "stop"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" in name])
def test_reading_the_norm_on_the_host_changes_no_bit(name: str, nonfinite: str) -> None:
    """Steps with gradients below, near and above the largest norm, one that is not finite, and one after it."""
    seen = []
    for reads_freely in (True, False):
        parameters, strategy = graded([1.0, 2.0]), make_strategy(reads_freely=reads_freely)
        optimizer, total = OPTIMIZERS[name](parameters), nn.utils.get_total_norm(grads(graded([1.0, 2.0]))).item()
        for scale in (0.5, 1.0, 1 + 1e-7, 1 + 2e-6, 3.0, float("nan"), 1.0):
            for parameter, value in zip(parameters, grads(graded([1.0, 2.0])), strict=True):
                parameter.grad = value * scale
            norms = strategy.step(optimizer, total + 2e-6, nonfinite=nonfinite)
            assert norms is not None
            each = [*parameters, *grads(parameters), norms.total, norms.each]
            seen.append([tensor.detach().clone().view(torch.int32).tolist() for tensor in each])
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_ignoring_takes_the_step() -> None:
    parameters = graded([1.0, 1.0])
    grads(parameters)[0][0, 0] = float("nan")
    make_strategy().step(torch.optim.SGD(parameters, lr=0.1), nonfinite="ignore")
    assert torch.isnan(parameters[0]).any()


@pytest.mark.parametrize("reads_freely", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stopping_holds_weights_and_optimizer_from_the_bad_step_on(name: str, reads_freely: bool) -> None:
    """Where an optimizer that is not fused would have to wait for the device, it does not, and says so."""
    parameters = graded([1.0, 2.0, 3.0])
    optimizer, strategy = OPTIMIZERS[name](parameters), make_strategy(reads_freely=reads_freely)
    strategy.step(optimizer, nonfinite="stop")
    weights, state = snapshot(parameters, optimizer)
    good = [gradient.clone() for gradient in grads(parameters)]
    grads(parameters)[1][2, 1] = float("nan")
    holds = reads_freely or "fused" in name
    for _ in range(2):
        norms = strategy.step(optimizer, nonfinite="stop")
        assert norms is not None
        assert norms.held == holds
        after_weights, after_state = snapshot(parameters, optimizer)
        kept = all(torch.equal(one, other) for one, other in zip(after_weights, weights, strict=True))
        assert kept == holds
        if holds:
            assert {key: same(value, state[key]) for key, value in after_state.items()} == dict.fromkeys(state, True)
        for parameter, gradient in zip(parameters, good, strict=True):
            parameter.grad = gradient.clone()
    assert not hasattr(optimizer, "found_inf")
    strategy.setup()  # another training
    strategy.step(optimizer, nonfinite="stop")
    assert not torch.equal(parameters[0], weights[0])


def test_fp16_scales_and_unscales() -> None:
    strategy = make_strategy("fp16")
    assert strategy.scales_gradients
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    strategy.backward((weight * torch.tensor([0.25, 0.5])).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.25 * 2**16, 0.5 * 2**16]
    norms = strategy.step(optimizer, nonfinite="stop")
    assert norms is not None
    assert norms.total.item() == pytest.approx((0.25**2 + 0.5**2) ** 0.5)  # of the true gradient
    assert weight.tolist() == [1.75, 2.5]


def test_fp16_leaves_out_a_step_that_overflows_and_halves_the_scale() -> None:
    strategy = make_strategy("fp16")
    assert strategy.precision is not None
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    strategy.backward((weight * float("inf")).sum())
    strategy.step(optimizer, max_norm=1.0, nonfinite="stop")
    assert weight.tolist() == [2.0]
    assert strategy.precision.state_dict()["scale"] == 2**15


def test_gradients_are_cleared() -> None:
    parameters = graded([1.0, 1.0])
    make_strategy().zero_grad(torch.optim.SGD(parameters, lr=0.1))
    assert all(parameter.grad is None for parameter in parameters)


def test_an_optimizers_own_zero_grad_is_called_too() -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = False) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    parameters = graded([1.0, 1.0])
    optimizer = Counting(parameters, lr=0.1)
    make_strategy().zero_grad(optimizer)
    assert optimizer.calls == 1
    assert all(parameter.grad is None for parameter in parameters)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_batches_of_any_kind_reach_the_device() -> None:
    strategy = Strategy()
    strategy.device = torch.device("meta")
    x = torch.ones(2)
    moved = strategy.to_device({"a": x, "b": [x, (x, "text")], "c": Pair(x, "n"), "d": 3})
    assert moved["a"].is_meta
    assert moved["b"][1][0].is_meta
    assert moved["b"][1][1] == "text"
    assert isinstance(moved["c"], Pair)
    assert moved["c"].x.is_meta
    assert moved["d"] == 3
    encoding = strategy.to_device(BatchEncoding({"input_ids": x}))
    assert isinstance(encoding, BatchEncoding)
    assert encoding.input_ids.is_meta
    strategy.device = torch.device("cpu")
    assert strategy.to_device(x) is x


def test_a_step_that_raises_leaves_no_mark_on_the_optimizer() -> None:
    parameters = graded([1.0, 2.0])
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_strategy(reads_freely=False).step(optimizer, nonfinite="skip")
    assert not hasattr(optimizer, "found_inf")
    handle.remove()
    before = parameters[0].detach().clone()
    optimizer.step()
    assert not torch.equal(parameters[0], before)


def test_one_that_only_calls_fused_optimizers_takes_no_bad_step() -> None:
    class Several(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})
            self.inner = torch.optim.AdamW(parameters, lr=0.1, fused=True)
            self.param_groups = self.inner.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    parameters = graded([1.0, 2.0])
    grads(parameters)[1][0, 0] = torch.nan
    before = [parameter.detach().clone() for parameter in parameters]
    make_strategy(reads_freely=False).step(Several(parameters), nonfinite="skip")
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))

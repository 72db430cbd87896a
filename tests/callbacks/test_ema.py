from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.resized import Remembering
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_kit.callbacks import EMA
from trainer_kit.run import Run


def train(run: Run, callback: EMA, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Steps that change all parameters and buffers; the weights after each."""
    for _ in range(steps):
        run.state.step += 1
        torch.manual_seed(run.state.step)
        with torch.no_grad():
            for tensor in run.model.state_dict().values():
                tensor.add_(torch.randn(tensor.shape) if tensor.is_floating_point() else 1)
        callback.on_step_end(run)
        yield copy.deepcopy(run.model.state_dict())


def evaluated(run: Run, callback: EMA) -> dict[str, torch.Tensor]:
    """The weights in an evaluation."""
    callback.on_evaluate_begin(run)
    weights = copy.deepcopy(run.model.state_dict())
    callback.on_evaluate_end(run, None)
    return weights


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_average_is_what_its_formula_says(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(nn.Linear(3, 2, dtype=torch.float64)), EMA(decay=0.9)
    expected = copy.deepcopy(run.model.state_dict())
    callback.on_train_begin(run)
    for weights in train(run, callback, 5):
        expected = {name: 0.9 * expected[name] + 0.1 * weights[name] for name in weights}
    found = evaluated(run, callback)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["on_evaluate_end", "on_exception"])
def test_the_trained_weights_come_back_bitwise(make_run: Callable[..., Run], how: str) -> None:
    run, callback = make_run(), EMA(decay=0.9)
    callback.on_train_begin(run)
    *_, trained = train(run, callback, 3)
    callback.on_evaluate_begin(run)
    assert not same(run.model.state_dict(), trained)
    getattr(callback, how)(run, ValueError() if how == "on_exception" else None)
    assert same(run.model.state_dict(), trained)
    getattr(callback, how)(run, ValueError() if how == "on_exception" else None)
    assert same(run.model.state_dict(), trained)


def test_every_and_start_step(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), EMA(decay=0.5, every=2, start_step=4)
    callback.on_train_begin(run)
    for weights in train(run, callback, 4):
        if run.state.step % 2 == 0:
            assert same(evaluated(run, callback), weights)
            expected = weights
    for weights in train(run, callback, 3):
        if run.state.step == 6:
            expected = {name: 0.5 * expected[name] + 0.5 * weights[name] for name in weights}
    found = evaluated(run, callback)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_state_is_restored_bitwise(make_run: Callable[..., Run]) -> None:
    straight, callback = make_run(), EMA(decay=0.9)
    callback.on_train_begin(straight)
    *_, half_way = train(straight, callback, 4)
    kept = copy.deepcopy(callback.state_dict())
    list(train(straight, callback, 4))

    resumed, again = make_run(), EMA(decay=0.9)
    resumed.model.load_state_dict(half_way)
    resumed.state.step = 4
    again.load_state_dict(kept)
    again.on_train_begin(resumed)
    list(train(resumed, again, 4))
    assert same(again.state_dict()["averages"], callback.state_dict()["averages"])
    assert same(evaluated(resumed, again), evaluated(straight, callback))


def test_batch_norm_is_averaged_too_but_not_its_count(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), EMA(decay=0.5)
    before = copy.deepcopy(run.model.state_dict())
    callback.on_train_begin(run)
    (after,) = train(run, callback, 1)
    found = evaluated(run, callback)
    torch.testing.assert_close(found["1.running_var"], (before["1.running_var"] + after["1.running_var"]) / 2)
    assert found["1.num_batches_tracked"] == 1


def test_half_precision_is_averaged_in_float32(make_run: Callable[..., Run]) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    run, callback = make_run(model), EMA(decay=0.999)
    callback.on_train_begin(run)
    nn.init.constant_(model.weight, 2.0)
    for step in range(1, 101):  # each step moves it by 0.001 or less, below what bfloat16 can hold beside 1
        run.state.step = step
        callback.on_step_end(run)
    assert callback.state_dict()["averages"]["weight"].item() == pytest.approx(2 - 0.999**100)
    assert evaluated(run, callback)["weight"].item() == pytest.approx(2 - 0.999**100, abs=0.01)
    assert model.weight.item() == 2.0


def test_tied_weights_stay_tied(make_run: Callable[..., Run]) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    run, callback = make_run(model), EMA(decay=0.5)
    callback.on_train_begin(run)
    list(train(run, callback, 1))
    assert list(callback.state_dict()["averages"]) == ["0.weight"]
    callback.on_evaluate_begin(run)
    assert model[0].weight is model[1].weight
    callback.on_evaluate_end(run, None)


def test_the_optimizer_and_gradients_are_left_alone(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), EMA(decay=0.9)
    callback.on_train_begin(run)
    run.model(torch.ones(1, 4)).sum().backward()
    parameters = list(run.model.parameters())
    evaluated(run, callback)
    assert all(one is other for one, other in zip(run.model.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in parameters)
    assert not any(tensor.requires_grad for tensor in callback.state_dict()["averages"].values())


def test_a_step_reads_nothing_from_the_device(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), EMA()
    callback.on_train_begin(run)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in str(func)
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        list(train(run, callback, 2))


def test_copy_to_another_model(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), EMA(decay=0.5)
    callback.on_train_begin(run)
    list(train(run, callback, 2))
    other = nn.Linear(4, 2)
    callback.copy_to(other)
    assert same(other.state_dict(), evaluated(run, callback))
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 4\).*\(3, 4\)"):
        callback.copy_to(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        callback.copy_to(nn.Sequential(nn.Linear(4, 2)))


def test_the_average_of_a_resized_buffer_begins_again(make_run: Callable[..., Run]) -> None:
    model, callback = Remembering(), EMA(decay=0.5)
    run = make_run(model)
    callback.on_train_begin(run)
    model(torch.ones(2, 3))
    run.state.step += 1
    callback.on_step_end(run)
    trained = copy.deepcopy(model.state_dict())
    assert torch.equal(callback.state_dict()["averages"]["bank.kept"], trained["bank.kept"])
    callback.on_evaluate_begin(run)
    model.bank.kept.resize_(5, 2)  # as torch's quantization does in evaluations too
    callback.on_evaluate_end(run, None)
    assert model.bank.kept.shape == (5, 2)
    assert same(model.state_dict() | {"bank.kept": trained["bank.kept"]}, trained)


def test_averages_of_another_model_are_refused(make_run: Callable[..., Run]) -> None:
    callback = EMA()
    callback.load_state_dict({"averages": {"weight": torch.zeros(2, 4)}})
    with pytest.raises(ValueError, match="'bias' has shape none in the averages"):
        callback.on_train_begin(make_run())


def test_an_evaluation_before_training_uses_the_weights(make_run: Callable[..., Run]) -> None:
    run = make_run()
    before = copy.deepcopy(run.model.state_dict())
    assert same(evaluated(run, EMA()), before)
    with pytest.raises(ValueError, match="averages"):
        EMA().copy_to(run.model)


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"every": 0}, {"start_step": -1}])
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        EMA(**options)


def test_averages_lie_in_memory_as_their_weights_do(make_run: Callable[..., Run]) -> None:
    convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    run = make_run(model=convolution)
    saved = EMA()
    saved.load_state_dict({"averages": {name: torch.rand(each.shape) for name, each in convolution.named_parameters()}})
    before = {name: each.clone() for name, each in saved.state_dict()["averages"].items()}
    saved.on_train_begin(run)
    averages = saved.state_dict()["averages"]
    assert averages["weight"].stride() == convolution.weight.stride()
    assert all(torch.equal(averages[name], value) for name, value in before.items())

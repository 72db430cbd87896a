"""What an optimizer computes after it was saved and loaded, bit for bit as without that."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kit.trainer import arguments
from scenarios.task import Net, Noisy, StopAt, digest, make_trainer
from torch import nn

from trainer_kit import Callback, Run, Trainer
from trainer_kit.utils.optimizer_state import (
    check_optimizer_state,
    copied_optimizer,
    described_groups,
    load_optimizer_state,
    optimizer_state,
    optimizers_in,
)
from trainer_kit.utils.pytree import flatten_state, unflatten_state

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

BY_NAME: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW fused amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
}


def turned(*shape: int) -> torch.Tensor:
    """Transposed in memory."""
    dimensions = range(len(shape))
    return torch.empty([shape[each] for each in reversed(dimensions)]).permute(*reversed(dimensions))


FORMATS: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": lambda: torch.empty(4, 3),
    "transposed": lambda: turned(5, 3),
    "channels last": lambda: torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels last, 1 by 1": lambda: torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last, of one channel": lambda: torch.empty(4, 1, 3, 2).to(memory_format=torch.channels_last),
    "channels last, 3d": lambda: torch.empty(2, 3, 2, 1, 2).to(memory_format=torch.channels_last_3d),
    "all turned": lambda: turned(2, 3, 4),
    "with gaps": lambda: torch.empty(4, 6)[:, ::2],
    "a scalar": lambda: torch.empty(()),
}


def parameters(names: list[str], dtype: torch.dtype) -> list[nn.Parameter]:
    made = []
    for number, name in enumerate(names):
        values = FORMATS[name]().to(dtype)
        values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(number)))
        made.append(nn.Parameter(values))
    return made


def steps(optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps with gradients that follow from the step's number, in their parameter's order in memory."""
    for number in range(first, last):
        generator = torch.Generator().manual_seed(100 + number)
        for group in optimizer.param_groups:
            for each in group["params"]:
                gradient = torch.randn(each.shape, generator=generator)
                each.grad = torch.empty_like(each).copy_(gradient)
        optimizer.step()


def through_a_file(state: Any) -> Any:
    """The state as a checkpoint brings it back: text, and tensors that are row-major."""
    tree, found = flatten_state(state)
    return unflatten_state(
        json.loads(json.dumps(tree)), {name: each.clone().contiguous() for name, each in found.items()}
    )


def resumed(make: Make, values: list[nn.Parameter], saved: Any) -> torch.optim.Optimizer:
    optimizer = make(values)
    load_optimizer_state(optimizer, through_a_file(saved))
    return optimizer


def copies(values: list[nn.Parameter], like: list[nn.Parameter] | None = None) -> list[nn.Parameter]:
    """Copies of these parameters, in the dtype and order in memory of others."""
    return [
        nn.Parameter(torch.empty_like(other).copy_(each))
        for each, other in zip(values, values if like is None else like, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(BY_NAME)),
    st.lists(st.sampled_from(sorted(FORMATS)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_every_optimizer_goes_on_with_the_same_bits(name: str, formats: list[str], dtype: torch.dtype) -> None:
    assume(not ("fused" in name and "with gaps" in formats))  # which torch's fused kernels get wrong, and we refuse
    straight = parameters(formats, dtype)
    optimizer = BY_NAME[name](straight)
    steps(optimizer, 0, 3)
    again = copies(straight)
    other = resumed(BY_NAME[name], again, optimizer_state(optimizer))
    for parameter, same in zip(straight, again, strict=True):
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                loaded = other.state[same][key]
                assert (loaded.dtype, loaded.stride()) == (value.dtype, value.stride()), key
    steps(optimizer, 3, 6)
    steps(other, 3, 6)
    assert all(torch.equal(one, two) for one, two in zip(straight, again, strict=True))


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD fused", "Adagrad fused"])
def test_state_follows_parameters_that_lie_otherwise_now(name: str) -> None:
    """A model is in channels_last from now on, or in another dtype."""
    straight = parameters(["channels last", "transposed"], torch.float32)
    optimizer = BY_NAME[name](straight)
    steps(optimizer, 0, 3)
    row_major = [nn.Parameter(each.detach().contiguous()) for each in straight]
    other = resumed(BY_NAME[name], row_major, optimizer_state(optimizer))
    back = copies(row_major, like=straight)
    third = resumed(BY_NAME[name], back, optimizer_state(other))
    doubles = [nn.Parameter(each.detach().double()) for each in straight]
    fourth = resumed(BY_NAME[name], doubles, optimizer_state(optimizer))
    for each in (optimizer, other, third, fourth):
        steps(each, 3, 6)
    for values in zip(straight, row_major, back, strict=True):
        for value in values[1:]:  # a kernel's last elements, which are others now, are rounded otherwise
            torch.testing.assert_close(value, values[0], rtol=1e-6, atol=1e-6)
    for double, single in zip(doubles, straight, strict=True):
        assert all(value.dtype == torch.float64 for key, value in fourth.state[double].items() if key != "step")
        torch.testing.assert_close(double.float(), single)


class Precise(torch.optim.Optimizer):
    """Sums gradients in float32 whatever the weights are, counts steps in int8, keeps a column-major matrix, a text."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["sum"] = torch.zeros_like(each, dtype=torch.float32)
                    state["count"] = torch.zeros(each.shape, dtype=torch.int8)
                    state["basis"] = [turned(2, 2).copy_(torch.ones(2, 2)), None]
                    state["rule"] = "sum"
                assert state["rule"] == "sum"
                state["sum"] += each.grad
                state["count"] += 1
                each -= 0.1 * state["sum"] / state["count"]


def test_a_state_keeps_its_own_dtype_and_order() -> None:
    straight = parameters(["channels last", "transposed"], torch.bfloat16)
    optimizer = Precise(straight)
    steps(optimizer, 0, 3)
    again = copies(straight)
    other = resumed(Precise, again, optimizer_state(optimizer))
    state = other.state[again[0]]
    assert (state["sum"].dtype, state["count"].dtype, state["basis"][0].stride()) == (torch.float32, torch.int8, (1, 2))
    steps(optimizer, 3, 6)
    steps(other, 3, 6)
    assert all(torch.equal(one, two) for one, two in zip(straight, again, strict=True))


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as people write it."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        matrices = [each for each in params if each.ndim == 2]
        others = [each for each in params if each.ndim != 2]
        self.parts = {
            "sgd": torch.optim.SGD(matrices, lr=0.01, momentum=0.9, fused=True),
            "adamw": torch.optim.AdamW(others, lr=0.01),
        }
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])


class Lookahead(torch.optim.Optimizer):
    """Slow weights in a state of its own, around another optimizer."""

    def __init__(self, params: Any) -> None:
        self.base = torch.optim.AdamW(params, lr=0.01, fused=True)
        self.defaults = self.base.defaults
        self.param_groups = self.base.param_groups
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]
        self.count = 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, each in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                slow.lerp_(each, 0.5)
                each.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": list(self.slow), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.slow, self.count = list(state_dict["slow"]), state_dict["count"]


class Delayed(torch.optim.Optimizer):
    """Steps by the oldest of the last three gradients, which a deque holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                last = self.state[each].setdefault("last", deque(maxlen=3))
                last.append(each.grad.clone())
                each.sub_(group["lr"] * last[0])


class Counting(torch.optim.Adam):
    """Counts its steps in a Python number, of which torch makes a tensor, as geoopt's RiemannianAdam does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
                average = state.setdefault("exp_avg", torch.zeros_like(each))
                average.lerp_(each.grad, 0.1)
                each.sub_(average, alpha=group["lr"] / (1 - 0.9 ** state["step"]))


@pytest.mark.parametrize("kind", [Both, Lookahead, Precise, Delayed, Counting])
def test_a_training_with_such_an_optimizer_is_resumed(kind: type[Any], tmp_path: Path) -> None:
    def trainer(folder: str, *callbacks: Callback) -> Any:
        made = make_trainer(tmp_path / folder, *callbacks, max_steps=10, save_steps=5)
        made.optimizer = kind(made.run.model.parameters())
        return made

    straight = trainer("straight")
    straight.train()
    trainer("resumed", StopAt(5)).train()
    again = trainer("resumed")
    groups = again.optimizer.param_groups
    dicts = [*groups]
    again.train(resume_from_checkpoint=True)
    assert digest(again) == digest(straight)
    assert all(one is other for one, other in zip(again.optimizer.param_groups, dicts, strict=True))
    assert groups[0]["lr"] < 0.01  # the schedule reaches those that step


@pytest.mark.parametrize("kind", [Both, Lookahead])
def test_a_schedule_of_an_inner_optimizer_has_its_effect_and_is_resumed(kind: type[Any], tmp_path: Path) -> None:
    def trainer(folder: str, *callbacks: Callback) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = kind(model.parameters())
        inner = optimizers_in(optimizer)[1]
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5 ** (step // 2))
        args = arguments(tmp_path / folder, max_steps=10, save_strategy="steps", save_steps=5)
        return Trainer(model, args, Noisy(), callbacks=[*callbacks], optimizer=optimizer, lr_scheduler=schedule)

    straight = trainer("straight")
    straight.plan()
    straight.train()
    assert optimizers_in(straight.optimizer)[1].param_groups[0]["lr"] == 0.01 * 0.5**5
    trainer("resumed", StopAt(5)).train()
    again = trainer("resumed")
    again.train(resume_from_checkpoint=True)
    values = [each.run.model.state_dict().values() for each in (straight, again)]
    assert all(torch.equal(one, two) for one, two in zip(*values, strict=True))
    assert optimizers_in(again.optimizer)[1].param_groups[0]["lr"] == 0.01 * 0.5**5


class Forgetful(Both):
    """Leaves a part out."""

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.parts["adamw"].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.parts["adamw"].load_state_dict(state_dict["adamw"])


class OneWay(Both):
    """Gives a state that it does not take."""

    load_state_dict = torch.optim.Optimizer.load_state_dict  # type: ignore[assignment]


class Hollow(Lookahead):
    """Calls torch's state_dict() without torch's __init__()."""

    state_dict = torch.optim.Optimizer.state_dict  # type: ignore[assignment]


class WithObject(Both):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lock": object()}


class NoDict(Both):
    def state_dict(self) -> Any:
        return [*super().state_dict().values()]


@pytest.mark.parametrize(
    ("kind", "error", "message", "step"),
    [
        (OneWay, ValueError, "OneWay.state_dict() returns 'sgd', 'adamw', which torch's load_state_dict() does not", 0),
        (Hollow, ValueError, "Hollow.state_dict() failed ('Hollow' object has no attribute", 0),
        (WithObject, TypeError, "the state of WithObject cannot be saved: state['lock'] is of type builtins.object", 0),
        (NoDict, TypeError, "NoDict.state_dict() returned a list; return a dict", 0),
        (Forgetful, ValueError, "Forgetful consists of SGD and AdamW, but its state_dict() holds", 1),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    kind: type[Any], error: type[Exception], message: str, step: int, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.optimizer = kind(trainer.run.model.parameters())
    with pytest.raises(error, match=re.escape(message)):
        trainer.train()
    assert trainer.run.state.step == step
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_training_that_saves_nothing_takes_any_optimizer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, save_strategy="no")
    trainer.optimizer = WithObject(trainer.run.model.parameters())
    assert trainer.train().global_step == 2


class Lossy(Both):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.parts["adamw"].load_state_dict(state_dict["adamw"])


class Rounding(Lookahead):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = 0


class Raising(Lookahead):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("bases")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lossy, "Lossy.load_state_dict() did not take 1 of "),
        (Rounding, "Rounding.load_state_dict() brought back 0 for 2 at 'count'"),
        (Raising, "Raising.load_state_dict() does not take what its state_dict() returned (KeyError: 'bases')"),
    ],
)
def test_a_state_that_does_not_come_back_is_an_error(kind: type[Any], message: str) -> None:
    values = parameters(["row-major", "a scalar"], torch.float32)
    optimizer = kind(values)
    steps(optimizer, 0, 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_optimizer_state(kind(copies(values)), through_a_file(optimizer_state(optimizer)))


def test_a_state_without_a_description_is_none() -> None:
    optimizer = torch.optim.SGD(parameters(["row-major"], torch.float32), lr=0.1)
    for saved in (optimizer.state_dict(), {"trainer_kit.groups": [{"params": [{}]}]}, {"trainer_kit.groups": 1}):
        with pytest.raises(ValueError, match="does not describe its parameters"):
            described_groups(saved)


def test_the_optimizers_in_an_optimizer() -> None:
    values = parameters(["row-major", "a scalar"], torch.float32)
    both = Both(values)
    assert optimizers_in(both) == [both, *both.parts.values()]
    plain = torch.optim.SGD(values, lr=0.1)
    assert optimizers_in(plain) == [plain]
    check_optimizer_state(both)


@pytest.mark.parametrize("kind", [Both, Lookahead, Precise])
def test_a_copy_of_an_optimizer_takes_the_same_steps_and_the_original_none(kind: type[Any]) -> None:
    values, others = (parameters(["row-major", "a scalar"], torch.float32) for _ in range(2))
    original = kind(values)
    torch.optim.lr_scheduler.ConstantLR(optimizers_in(original)[-1])  # wraps the step of its optimizer
    steps(original, 0, 2)
    for value, other in zip(values, others, strict=True):
        other.data.copy_(value.data)
    before, method = [value.detach().clone() for value in values], kind.step
    calls: list[Any] = []
    optimizers_in(original)[-1].register_step_pre_hook(lambda *given: calls.append(given))
    copied = copied_optimizer(original, {id(value): other for value, other in zip(values, others, strict=True)})
    steps(copied, 2, 5)
    assert not calls
    assert kind.step is method
    assert all(torch.equal(*pair) for pair in zip(values, before, strict=True))
    steps(original, 2, 5)
    assert calls
    assert all(torch.equal(*pair) for pair in zip(values, others, strict=True))


class Rates(Callback):
    """Halves the peaks after a step, or sets the rate of one step."""

    def __init__(self, at: int, directly: bool = False) -> None:
        self.at = at
        self.directly = directly
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, run: Run) -> None:
        assert run.optimizer is not None
        self.rates.append(run.optimizer.param_groups[0]["lr"])

    def on_step_end(self, run: Run) -> None:
        if run.state.step != self.at:
            return
        if self.directly:
            assert run.optimizer is not None
            for group in run.optimizer.param_groups:
                group["lr"] = 0.5
        else:
            run.lr_scheduler.base_lrs = [rate / 2 for rate in run.lr_scheduler.base_lrs]


def rates(folder: Path, at: int, directly: bool = False, stop: int | None = None) -> list[float]:
    callback = Rates(at, directly)
    stops = [] if stop is None else [StopAt(stop)]
    arguments = {"max_steps": 8, "lr_scheduler_type": "linear", "warmup_steps": 0, "log_level": "warning"}
    make_trainer(folder, callback, *stops, **arguments).train(resume_from_checkpoint=True)
    return callback.rates


def test_peaks_that_a_callback_changes_stay_through_a_resume(tmp_path: Path) -> None:
    plain = rates(tmp_path / "plain", at=0)
    expected = [*plain[:3], *(rate / 2 for rate in plain[3:])]
    expected[3] = plain[3]  # its rate was set after the third step, before on_step_end
    assert rates(tmp_path / "halved", at=3) == expected
    first = rates(tmp_path / "resumed", at=3, stop=5)
    assert first + rates(tmp_path / "resumed", at=0) == expected


def test_a_rate_that_a_callback_sets_holds_for_one_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = rates(tmp_path / "plain", at=0)
    assert not caplog.records
    assert rates(tmp_path / "set", at=3, directly=True) == [*plain[:3], 0.5, *plain[4:]]
    (record,) = caplog.records
    assert "a learning rate was set to 0.5, which held for one step" in record.getMessage()
    assert "set run.lr_scheduler.base_lrs" in record.getMessage()


@pytest.mark.parametrize("kind", [Both, Lookahead])
def test_a_plan_leaves_optimizers_in_an_optimizer_alone(kind: type[Any], tmp_path: Path) -> None:
    def trainer(*callbacks: Callback) -> Any:
        made = make_trainer(tmp_path, *callbacks, max_steps=10)
        made.optimizer = kind(made.run.model.parameters())
        return made

    trainer(StopAt(5)).train()
    again = trainer()
    for parameter in again.run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [each.detach().clone() for each in again.run.model.parameters()]
    rates = [group["lr"] for group in again.optimizer.param_groups]
    plan = again.plan(resume_from_checkpoint=True)
    assert plan.schedule.optimizer == kind.__name__
    assert [step for step, _ in plan.schedule.points] == [6, 7, 8, 9, 10]
    assert all(torch.equal(*pair) for pair in zip(again.run.model.parameters(), before, strict=True))
    assert [group["lr"] for group in again.optimizer.param_groups] == rates

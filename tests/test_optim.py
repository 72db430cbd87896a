from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, StepLR

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.optim import (
    check_optimizer,
    make_optimizer,
    make_plateau_scheduler,
    make_scheduler,
    own_scheduler,
    parameter_groups,
)
from trainer_kit.utils.adafactor import UnscaledAdafactor


def test_a_group_without_a_learning_rate_is_refused() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"beta": 0.9})

    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"^optimizer=Rateless has a parameter group without 'lr'"):
        check_optimizer(Rateless(model.parameters()), model)


class CustomRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Scale(nn.LayerNorm):
    """A normalization whose own name does not say so."""


class LogNormal(nn.Module):
    """No normalization, though its name looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.lstm = nn.LSTM(4, 4)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), CustomRMSNorm(4), Scale(4)]
        )
        self.distribution = LogNormal()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def arguments(**settings: Any) -> TrainingArguments:
    return TrainingArguments(**{"learning_rate": 0.1, "weight_decay": 0.5, **settings})


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_groups(optim: str) -> None:
    model = Everything()
    optimizer = make_optimizer(model, arguments(optim=optim))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert decayed["param_names"] == [
        *("embedding.weight", "linear.weight", "attention.in_proj_weight", "attention.out_proj.weight"),
        *("lstm.weight_ih_l0", "lstm.weight_hh_l0", "distribution.scale"),
    ]
    assert all("bias" in name or name.startswith("norms.") for name in plain["param_names"])
    both = decayed["params"] + plain["params"]
    assert {id(parameter) for parameter in both} == {id(parameter) for parameter in model.parameters()}
    assert len(both) == len(list(model.parameters()))
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert group["lr"] == 0.1
        assert all(
            named[name] is parameter for name, parameter in zip(group["param_names"], group["params"], strict=True)
        )


def test_a_transformers_model() -> None:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    decayed, plain = make_optimizer(transformers.LlamaForCausalLM(config), arguments()).param_groups
    assert all(name.endswith("norm.weight") for name in plain["param_names"])
    assert len(plain["param_names"]) == 3
    assert not any("norm" in name for name in decayed["param_names"])


def test_frozen_parameters_never_reach_the_optimizer() -> None:
    model = Everything().requires_grad_(False)
    model.linear.bias.requires_grad_(True)
    (group,) = make_optimizer(model, arguments()).param_groups
    assert group["param_names"] == ["linear.bias"]
    assert group["weight_decay"] == 0.0


@pytest.mark.parametrize("model", [nn.Linear(2, 2).requires_grad_(False), nn.ReLU()])
def test_nothing_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="has no parameter that requires a gradient; unfreeze some"):
        make_optimizer(model, arguments())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_adamw_is_fused_on_the_cpu_and_steps(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 3).to(dtype)
    optimizer = make_optimizer(model, arguments())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(group["fused"] is True for group in optimizer.param_groups)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_fused_kernels_get_no_parameter_with_gaps() -> None:
    """They take the memory as it lies: the same step with and without them gives other weights."""
    stepped = []
    for fused in (True, False):
        model = nn.Linear(6, 4, bias=False)
        model.weight = nn.Parameter(torch.zeros(4, 12)[:, ::2])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        if fused:
            with pytest.raises(
                ValueError, match=r"AdamW is fused, but a parameter of shape \[4, 6\] has gaps .*fused=False"
            ):
                check_optimizer(optimizer, model)
        assert not any(group["fused"] for group in make_optimizer(model, arguments()).param_groups)
        model.weight.grad = torch.arange(24.0).view(4, 6) + 1
        optimizer.step()
        stepped.append(model.weight.detach().clone())
    assert not torch.allclose(*stepped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sgd_trains_all_of_a_parameter(dtype: torch.dtype) -> None:
    """Fused or not, as torch can; one of the user that cannot is refused."""
    model = nn.Linear(64, 64, dtype=dtype)
    optimizer = make_optimizer(model, arguments(optim="sgd", weight_decay=0.0))
    before = model.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    optimizer.step()
    assert (model.weight != before).all()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if optimizer.param_groups[0]["fused"]:
        check_optimizer(theirs, model)
    else:
        with pytest.raises(ValueError, match=r"SGD is fused, .*float16 parameter on the CPU.*fused=False"):
            check_optimizer(theirs, model)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.Linear(3, 3, dtype=torch.complex64), id="complex"),
        pytest.param(nn.Linear(3, 3, device="meta"), id="meta"),
    ],
)
def test_adamw_is_not_fused_where_torch_cannot(model: nn.Module) -> None:
    optimizer = make_optimizer(model, arguments())
    assert not any(group["fused"] for group in optimizer.param_groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Sparse(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(4, 2, sparse=True))


@pytest.mark.parametrize(
    ("make", "text", "is_fused"),
    [
        (lambda: nn.Linear(3, 3), None, True),
        (lambda: nn.Linear(3, 3), "momentum=0.9,nesterov=true", True),
        (lambda: nn.Linear(3, 3), "momentum=0.9,dampening=0.5", False),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), None, False),
        (Sparse, None, False),
    ],
)
def test_sgd_is_fused_where_its_kernel_takes_the_same_step(
    make: Callable[[], nn.Module], text: str | None, is_fused: bool
) -> None:
    model = make()
    optimizer = make_optimizer(model, arguments(optim="sgd", optim_args=text, weight_decay=0.0))
    assert isinstance(optimizer, torch.optim.SGD)
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [is_fused] * len(optimizer.param_groups)
    if isinstance(model, Sparse):
        model(torch.tensor([1])).sum().backward()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_adamw_is_fused_on_cuda_and_steps() -> None:
    model = nn.Linear(3, 3).cuda()
    optimizer = make_optimizer(model, arguments())
    assert all(group["fused"] is True for group in optimizer.param_groups)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3, device="cuda")).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


REFERENCES: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw_torch": lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-3, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adafactor": lambda groups: UnscaledAdafactor(groups, lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optim", sorted(REFERENCES))
def test_steps_equal_torchs_own_bit_for_bit(optim: str, dtype: torch.dtype) -> None:
    def trained(make: Callable[[nn.Sequential], torch.optim.Optimizer]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=generator)
        optimizer = make(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4, dtype=dtype, generator=generator)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    args = arguments(optim=optim, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-3)
    ours = trained(lambda model: make_optimizer(model, args))
    theirs = trained(
        lambda model: REFERENCES[optim](
            [
                {"params": [model[0].weight, model[2].weight], "weight_decay": 0.5},
                {"params": [model[0].bias, *model[1].parameters(), model[2].bias], "weight_decay": 0.0},
            ]
        )
    )
    for own, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, reference, rtol=0, atol=0)


def hide_8bit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.optim", "torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, None)


def test_adamw_8bit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_8bit(monkeypatch)
    with pytest.raises(ImportError, match=r"^optim='adamw_8bit' needs .* run `pip install bitsandbytes`, or torchao$"):
        make_optimizer(nn.Linear(2, 2), arguments(optim="adamw_8bit"))


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_adamw_8bit_is_taken_from_either_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    class AdamW8bit(torch.optim.AdamW):
        pass

    hide_8bit(monkeypatch)
    module: Any = types.ModuleType(f"{package}.optim")
    module.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.optim", module)
    args = arguments(optim="adamw_8bit", adam_beta1=0.5, adam_epsilon=1e-4)
    optimizer = make_optimizer(nn.Linear(2, 2), args)
    assert type(optimizer) is AdamW8bit
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"], optimizer.defaults["eps"]) == (
        0.1,
        (0.5, 0.999),
        1e-4,
    )


PEAK = 0.1


def sgd(rate: float = PEAK) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate)


def rates(scheduler: Any, steps: int) -> list[float]:
    """The learning rates of the first `steps` steps, and the one after them."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return [*seen, scheduler.optimizer.param_groups[0]["lr"]]


def our_rates(total: int, rate: float = PEAK, **settings: Any) -> list[float]:
    return rates(make_scheduler(sgd(rate), arguments(**settings), total), total)


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (1, 2), (1, 10), (5, 6), (5, 97)])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("constant_with_warmup", {}),
        ("polynomial", {}),
        ("polynomial", {"power": 2.0, "lr_end": 0.01}),
        ("warmup_stable_decay", {"num_decay_steps": 1}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr": 0.01}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.5}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 7}),
    ],
)
def test_schedules_equal_those_of_transformers(name: str, numbers: dict[str, float], warmup: int, total: int) -> None:
    check_against_transformers(name, numbers, warmup, total)


@pytest.mark.parametrize("decay", [0, 1, 7, 15])
def test_warmup_stable_decay_equals_that_of_transformers(decay: int) -> None:
    check_against_transformers("warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": 0.1}, 5, 20)


def check_against_transformers(name: str, numbers: dict[str, float], warmup: int, total: int) -> None:
    theirs = transformers.get_scheduler(
        name, sgd(), num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=numbers
    )
    ours = our_rates(total, lr_scheduler_type=name, lr_scheduler_kwargs=numbers, warmup_steps=warmup)
    assert ours == pytest.approx(rates(theirs, total), rel=0, abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "warmup_stable_decay"])
def test_a_run_of_warmup_only_ends_at_the_schedules_end(name: str) -> None:
    ours = our_rates(4, lr_scheduler_type=name, warmup_steps=4)
    assert ours == pytest.approx([0.0, PEAK / 4, PEAK / 2, PEAK * 3 / 4, 0.0], abs=1e-7)


def test_constant() -> None:
    assert our_rates(5, lr_scheduler_type="constant") == [PEAK] * 6


@pytest.mark.parametrize("total", [2, 9, 10, 100])
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"pct_start": 0.55},
        {"pct_start": 0.0},
        {"pct_start": 1.0},
        {"div_factor": 10.0, "final_div_factor": 100.0},
    ],
)
def test_one_cycle_equals_torchs_own(numbers: dict[str, Any], total: int) -> None:
    theirs = torch.optim.lr_scheduler.OneCycleLR(sgd(), max_lr=PEAK, total_steps=total, cycle_momentum=False, **numbers)
    ours = our_rates(total, lr_scheduler_type="one_cycle", lr_scheduler_kwargs=numbers)
    assert ours[:-1] == pytest.approx(rates(theirs, total - 1), rel=0, abs=1e-12)
    assert ours[-1] == ours[-2]


def test_one_cycle_may_begin_at_its_top() -> None:
    ours = our_rates(10, lr_scheduler_type="one_cycle", lr_scheduler_kwargs={"pct_start": 0.1})
    assert ours[0] == PEAK
    assert ours[9] == pytest.approx(PEAK / 25 / 1e4)


@pytest.mark.parametrize(
    ("name", "last"),
    [("linear", 0.0), ("cosine", 0.0), ("polynomial", 1e-7), ("warmup_stable_decay", 0.0), ("constant", PEAK)],
)
def test_schedules_end_at_their_last_value_and_stay_there(name: str, last: float) -> None:
    scheduler = make_scheduler(sgd(), arguments(lr_scheduler_type=name), 20)
    assert rates(scheduler, 20)[-1] == pytest.approx(last, rel=0, abs=1e-17)
    assert rates(scheduler, 3) == pytest.approx([last] * 4, rel=0, abs=1e-17)


def test_the_decay_of_warmup_stable_decay_takes_a_tenth() -> None:
    ours = our_rates(50, lr_scheduler_type="warmup_stable_decay", warmup_steps=5)
    assert ours[5:46] == [PEAK] * 41
    assert ours[46] < PEAK
    assert our_rates(10, lr_scheduler_type="warmup_stable_decay", warmup_steps=10)[-1] == 0.0


def test_warmup_from_a_ratio_is_rounded_up_and_steps_override_it() -> None:
    assert our_rates(10, warmup_ratio=0.25).index(PEAK) == 3
    assert our_rates(10, warmup_ratio=0.25, warmup_steps=6).index(PEAK) == 6


def test_a_warmup_longer_than_the_run() -> None:
    assert our_rates(4, warmup_steps=8) == pytest.approx([0.0, PEAK / 8, PEAK / 4, PEAK * 3 / 8, PEAK / 2])


@pytest.mark.parametrize("name", ["constant", "one_cycle"])
@pytest.mark.parametrize("settings", [{"warmup_steps": 3}, {"warmup_ratio": 0.1}])
def test_a_warmup_without_effect_is_a_warning(name: str, settings: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"lr_scheduler_type='{name}' has no warmup; .* have no effect"):
        make_scheduler(sgd(), arguments(lr_scheduler_type=name, **settings), 10)


def test_each_group_keeps_its_own_peak() -> None:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.2}])
    scheduler = make_scheduler(optimizer, arguments(), 4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.75, 0.15])


FLOORS = [("polynomial", {"lr_end": 0.01}), ("cosine_with_min_lr", {"min_lr": 0.01})]


@pytest.mark.parametrize(("name", "numbers"), FLOORS)
def test_a_floor_is_that_of_the_default_rate_as_in_transformers(name: str, numbers: dict[str, float]) -> None:
    def two_groups() -> torch.optim.Optimizer:
        first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second]}], lr=PEAK)

    theirs = transformers.get_scheduler(
        name, two_groups(), num_warmup_steps=0, num_training_steps=6, scheduler_specific_kwargs=numbers
    )
    ours = make_scheduler(two_groups(), arguments(lr_scheduler_type=name, lr_scheduler_kwargs=numbers), 6)
    assert rates(ours, 6) == pytest.approx(rates(theirs, 6), rel=0, abs=1e-12)
    assert ours.get_last_lr() == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize(("name", "numbers"), FLOORS)
def test_a_floor_stays_where_schedules_are_made_again(name: str, numbers: dict[str, float]) -> None:
    """Also for a tensor, which a schedule changes in place, and for peaks that a callback has changed."""
    args = arguments(lr_scheduler_type=name, lr_scheduler_kwargs=numbers)
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=torch.tensor(PEAK))
    for _ in range(2):
        rates(make_scheduler(optimizer, args, 4), 4)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    scheduler = make_scheduler(optimizer, args, 4)
    scheduler.base_lrs = [peak / 2 for peak in scheduler.base_lrs]
    rates(make_scheduler(optimizer, args, 4), 4)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.005)


def test_a_second_schedule_starts_from_the_same_peak() -> None:
    optimizer = sgd()
    args = arguments(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 0.05})
    rates(make_scheduler(optimizer, args, 4), 3)
    assert rates(make_scheduler(optimizer, args, 2), 2) == pytest.approx([PEAK, 0.075, 0.05])


def test_a_learning_rate_of_zero() -> None:
    assert our_rates(3, rate=0.0) == [0.0] * 4


@pytest.mark.parametrize("name", ["cosine", "one_cycle", "warmup_stable_decay", "inverse_sqrt"])
def test_a_schedule_goes_on_from_its_state(name: str) -> None:
    args = arguments(lr_scheduler_type=name)
    whole = rates(make_scheduler(sgd(), args, 20), 20)
    first = make_scheduler(sgd(), args, 20)
    rates(first, 8)
    second = make_scheduler(sgd(), args, 20)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates(second, 12) == whole[8:]


def test_a_schedule_goes_on_at_any_place_without_a_step_before() -> None:
    args = arguments(warmup_steps=4)
    whole = rates(make_scheduler(sgd(), args, 20), 20)
    assert rates(make_scheduler(sgd(), args, 20, 8), 12) == whole[8:]
    scheduler = make_scheduler(sgd(), args, 20)
    rates(scheduler, 3)
    scheduler.go_on_at(8)
    assert scheduler.get_last_lr() == whole[8:9]
    assert rates(scheduler, 12) == whole[8:]
    scheduler = make_scheduler(sgd(), args, 20, 8)
    scheduler.step()  # of a step that was left out: no warning


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("linear", {"power": 2}, "has 'power', which lr_scheduler_type='linear' does not know; allowed: nothing"),
        ("constant", {"num_cycles": 1}, "'constant' does not know; allowed: nothing"),
        ("cosine", {"cycles": 1}, "has 'cycles', .*'cosine' does not know; allowed: num_cycles$"),
        ("cosine", {"span": 1}, "has 'span', .* allowed: num_cycles$"),
        ("cosine", {"num_cycles": 0}, "num_cycles=0, which is not allowed; it must be above 0"),
        ("polynomial", {"power": 0}, "power=0, .* above 0"),
        (
            "polynomial",
            {"lr_end": 0.1},
            r"lr_end=0\.1, .* at least 0 and below the optimizer's default learning rate 0\.1",
        ),
        ("polynomial", {"lr_end": -0.1}, r"lr_end=-0\.1, .* at least 0"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 11},
            "num_decay_steps=11, .* from 0 to 10, whole: the run has 10 steps and a warmup of 0; lower num_decay_steps "
            "or the warmup$",
        ),
        ("warmup_stable_decay", {"num_decay_steps": -1}, "num_decay_steps=-1, .* from 0 to 10, whole"),
        ("warmup_stable_decay", {"num_decay_steps": 2.5}, r"num_decay_steps=2\.5, .* from 0 to 10, whole"),
        ("warmup_stable_decay", {"min_lr_ratio": 1.5}, r"min_lr_ratio=1\.5, .* from 0 to 1"),
        ("cosine_with_restarts", {"num_cycles": 0}, "num_cycles=0, .* above 0"),
        (
            "cosine_with_min_lr",
            {"min_lr": 0.2},
            r"min_lr=0\.2, .* from 0 to the optimizer's default learning rate 0\.1",
        ),
        ("cosine_with_min_lr", {"min_lr_rate": 1.5}, r"min_lr_rate=1\.5, .* from 0 to 1"),
        ("inverse_sqrt", {"timescale": 0}, "timescale=0, .* above 0"),
        ("one_cycle", {"pct_start": 1.5}, r"pct_start=1\.5, .* from 0 to 1"),
        ("one_cycle", {"div_factor": 0}, "div_factor=0, .* above 0"),
        ("one_cycle", {"final_div_factor": -1}, "final_div_factor=-1, .* above 0"),
        ("one_cycle", {"max_lr": 1}, "has 'max_lr', .* allowed: pct_start, div_factor, final_div_factor$"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(name: str, numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^lr_scheduler_kwargs has .*{message.removeprefix('has ')}"):
        make_scheduler(sgd(), arguments(lr_scheduler_type=name, lr_scheduler_kwargs=numbers), 10)


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^total_steps=0 is not allowed"):
        make_scheduler(sgd(), arguments(), 0)


def test_a_scheduler_class_is_called_or_refused_with_what_to_give() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), arguments())
    assert isinstance(own_scheduler(LinearLR, optimizer), LinearLR)
    sentence = (
        r"lr_scheduler=StepLR cannot be called with the optimizer alone \(missing a required argument: 'step_size'\); "
        r"give a function such as lambda optimizer: StepLR\(optimizer, …\)"
    )
    with pytest.raises(TypeError, match=sentence):
        own_scheduler(StepLR, optimizer)
    with pytest.raises(TypeError, match="lr_scheduler=get_cosine_schedule_with_warmup cannot be called"):
        own_scheduler(transformers.get_cosine_schedule_with_warmup, optimizer)
    given = StepLR(optimizer, 3)
    assert own_scheduler(given, optimizer) is given

    class ByEpoch:  # such as timm's schedulers
        def step(self, epoch: int) -> None:
            pass

    with pytest.raises(TypeError, match=r"step\(\) of lr_scheduler=ByEpoch needs arguments \(.*'epoch'\), but is"):
        own_scheduler(ByEpoch(), optimizer)
    assert own_scheduler(ReduceLROnPlateau(optimizer), optimizer)


def test_an_optimizer_class_is_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"optimizer=AdamW is a class; give an object of it, such as AdamW\(model"):
        check_optimizer(torch.optim.AdamW, nn.Linear(2, 2))


@pytest.mark.parametrize(
    "options", ["momentum=0.9", "momentum=0.9, nesterov=true", "momentum=0.5,dampening=0.25", "nesterov=false"]
)
def test_options_of_sgd_mean_what_they_mean_in_transformers(options: str, tmp_path: Path) -> None:
    theirs = transformers.TrainingArguments(output_dir=tmp_path, optim="sgd", optim_args=options, use_cpu=True)
    kind, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(theirs)
    args = TrainingArguments(optim="sgd", optim_args=options, learning_rate=theirs.learning_rate)
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    optimizers = make_optimizer(model, args), kind(other.parameters(), **settings)
    for step in range(3):
        for each in (model, other):
            each(torch.full((2, 4), float(step + 1))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"optim_args": "momentum=0.9"}, "has no effect with optim='adamw_torch'"),
        ({"optim": "sgd", "optim_args": "momentum"}, "momentum=0.9,nesterov=true"),
        ({"optim": "sgd", "optim_args": "momentum=high"}, "momentum=0.9,nesterov=true"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "has momentun; SGD takes momentum, dampening, nesterov"),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, "has momentum=-1.0; give a number from 0"),
        ({"optim": "sgd", "optim_args": "momentum=nan"}, "has momentum=nan; give a number from 0"),
        ({"optim": "sgd", "optim_args": "nesterov=1"}, "has nesterov=1.0; give true or false"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "has nesterov without momentum"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TrainingArguments(**given)


def test_groups_that_are_added_later_have_no_peak() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters[:1], lr=0.1)
    schedule = make_scheduler(optimizer, TrainingArguments(), 10)
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.5})
    assert schedule.base_lrs == [0.1]
    schedule.base_lrs = [0.2]
    assert [group.get("initial_lr") for group in optimizer.param_groups] == [0.2, None]


def test_a_cosine_with_a_floor_needs_one_floor() -> None:
    for numbers in ({}, {"min_lr": 0.01, "min_lr_rate": 0.1}):
        with pytest.raises(ValueError, match="'cosine_with_min_lr' needs min_lr or min_lr_rate in lr_scheduler_kwargs"):
            make_scheduler(sgd(), arguments(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=numbers), 10)


def test_reduce_lr_on_plateau_follows_the_metric() -> None:
    given: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    args = arguments(**given, lr_scheduler_kwargs={"patience": 0, "factor": 0.5})
    assert args.metric_for_best_model == "eval_loss"
    assert make_plateau_scheduler(sgd(), args).mode == "min"
    scheduler = make_plateau_scheduler(sgd(), arguments(**given, metric_for_best_model="accuracy"))
    assert (scheduler.mode, scheduler.patience, scheduler.factor) == ("max", 10, 0.1)
    with pytest.raises(ValueError, match="has 'cycles', which lr_scheduler_type='reduce_lr_on_plateau' does not know"):
        make_plateau_scheduler(sgd(), arguments(**given, lr_scheduler_kwargs={"cycles": 1}))
    with pytest.raises(ValueError, match=r"lr_scheduler_kwargs=\{'factor': 2\}: Factor should be < 1"):
        make_plateau_scheduler(sgd(), arguments(**given, lr_scheduler_kwargs={"factor": 2}))
    with pytest.warns(UserWarning, match="'reduce_lr_on_plateau' has no warmup"):
        make_plateau_scheduler(sgd(), arguments(**given, warmup_steps=3))


def test_norms_in_a_dict_of_keras_do_not_decay() -> None:
    """keras' layers are no modules; a ParameterDict has their weights by path."""
    names = ["net/dense/kernel", "net/dense/bias", "net/layer_normalization/gamma", "net/normal_dense/kernel"]
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in names})
    decayed, plain = ([name for name, _ in group["params"]] for group in parameter_groups(model, 0.1))
    assert [name.rpartition("/")[0] for name in decayed] == ["weights.net/dense", "weights.net/normal_dense"]
    assert len(plain) == 2

"""Configuration objects say which of their fields have no effect, and take accelerate's values."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from trainer_kit.accelerator import Accelerator, utils
from trainer_kit.accelerator.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

CLASSES = KwargsHandler.__subclasses__()
WITHOUT_EFFECT = [
    (each, name) for each in CLASSES for name in getattr(each, "_WITHOUT_EFFECT")  # noqa: B009 - private
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), WITHOUT_EFFECT, ids=lambda value: getattr(value, "__name__", value))
def test_a_field_without_effect_says_so_once(kind: type[Any], name: str) -> None:
    default = next(field.default for field in dataclasses.fields(kind) if field.name == name)
    with pytest.warns(UserWarning, match=f"^{kind.__name__}: {name} without effect") as caught:
        given = kind(**{name: not default if isinstance(default, bool) else 1})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind()
        dataclasses.asdict(given)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"comm_wrapper": DDPCommunicationHookType.FP16}, "comm_wrapper has no effect without comm_hook"),
        (
            {"comm_hook": "fp16", "comm_state_option": {"matrix_approximation_rank": 2}},
            "comm_state_option has no effect without comm_hook='power_sgd'",
        ),
    ],
)
def test_a_field_that_needs_another_says_so(fields: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason):
        DistributedDataParallelKwargs(**fields)


def test_hooks_that_have_what_they_need_are_silent() -> None:
    hook = DDPCommunicationHookType.POWER_SGD
    kwargs = DistributedDataParallelKwargs(
        comm_hook=hook, comm_wrapper=DDPCommunicationHookType.BF16, comm_state_option={"matrix_approximation_rank": 2}
    )
    assert kwargs.options()["comm_hook"] == ("power_sgd", "bf16", {"matrix_approximation_rank": 2})


def test_accumulation_without_a_number_is_one() -> None:
    number: Any = None
    plugin = GradientAccumulationPlugin(num_steps=number, sync_with_dataloader=False)
    assert plugin.num_steps == 1
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 1


def test_what_has_no_effect_on_an_accelerator_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="rng_types has no effect"):
        Accelerator(cpu=True, rng_types=["torch"])
    accelerator = Accelerator(cpu=True, device_placement=False)
    accelerator.prepare(torch.nn.Linear(2, 2))
    warns = pytest.warns(UserWarning, match="device_placement=False has no effect on models")
    with pytest.raises(ValueError, match="on the meta device"), warns:
        accelerator.prepare(torch.nn.Linear(2, 2, device="meta"))


def test_all_names_can_be_imported_with_a_star() -> None:
    names: dict[str, Any] = {}
    exec("from trainer_kit.accelerator.utils import *", names)
    assert names["DataLoaderConfiguration"] is DataLoaderConfiguration
    assert names["set_seed"] is utils.set_seed


def test_handlers_are_attributes() -> None:
    handlers = [
        AutocastKwargs(), DistributedDataParallelKwargs(), GradScalerKwargs(), InitProcessGroupKwargs(),
        ProfileKwargs(),
    ]  # fmt: skip
    given = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    names = ["autocast_handler", "ddp_handler", "scaler_handler", "init_handler", "profile_handler"]
    assert [getattr(given, name) for name in names] == handlers
    assert (given.native_amp, given.has_lomo_optimizer) == (True, False)
    bare = Accelerator(cpu=True)
    assert [getattr(bare, name) for name in names] == [None] * 5
    assert not bare.native_amp


@pytest.mark.parametrize("kind", [TorchDynamoPlugin, ProjectConfiguration, FullyShardedDataParallelPlugin])
def test_defaults_are_silent(kind: type[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind()

from __future__ import annotations

import pytest
import torch
from kit.resized import Remembering
from torch import nn
from torch.ao.quantization import FakeQuantize

from trainer_kit.utils.own_loading import loads_itself, prefixes_of_own_loading


def test_modules_that_load_themselves() -> None:
    model = Remembering()
    assert prefixes_of_own_loading(model) == ("bank.",)
    model.linear.register_load_state_dict_pre_hook(lambda *args: None)
    assert prefixes_of_own_loading(model) == ("linear.", "bank.")
    assert prefixes_of_own_loading(model.linear) == ("",)


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.BatchNorm1d(1), nn.InstanceNorm1d(1)], ids=str)
def test_torchs_own_modules_keep_their_shapes(module: nn.Module) -> None:
    assert not loads_itself(module)


def test_torchs_fake_quantization_loads_itself() -> None:
    assert loads_itself(FakeQuantize())


def test_a_method_of_the_instance_counts() -> None:
    module = nn.Linear(1, 1)

    def load(*args: object) -> None:
        raise NotImplementedError

    module._load_from_state_dict = load
    assert loads_itself(module)


def test_the_hooks_of_fully_shard_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(1, 1)

    def to_sharded(*args: object) -> None:
        raise NotImplementedError

    to_sharded.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    module._register_load_state_dict_pre_hook(to_sharded)
    assert not loads_itself(module)
    module.register_load_state_dict_pre_hook(torch.nn.Identity())
    assert loads_itself(module)

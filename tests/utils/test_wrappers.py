"""The model inside its wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit.utils.wrappers import without_adapters, without_wrappers


class Compiled(nn.Module):
    """Has its model where torch.compile's module has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


class Holder(nn.Module):
    """A model of the user with a module of that name among others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod, self.head = model, nn.Linear(2, 2)


def test_any_number_of_wrappers_is_taken_off() -> None:
    model = nn.Linear(2, 2)
    for wrapped in (model, Compiled(model), nn.DataParallel(model), Compiled(nn.DataParallel(Compiled(model)))):
        assert without_wrappers(wrapped) is model


@pytest.mark.slow  # it imports torch's compiler
def test_torchs_own_wrapper_is_known() -> None:
    model = nn.Linear(2, 2)
    assert without_wrappers(torch.compile(model, backend="eager")) is model


def test_a_model_that_holds_more_stays() -> None:
    holder = Holder(nn.Linear(2, 2))
    assert without_wrappers(holder) is holder
    module = nn.Sequential(nn.Linear(2, 2))
    assert without_wrappers(module) is module


def test_without_adapters() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(1, 1)

        def get_base_model(self) -> torch.nn.Module:
            return self.base

    adapted = Adapted()
    assert without_adapters(adapted) is adapted.base
    assert without_adapters(adapted.base) is adapted.base

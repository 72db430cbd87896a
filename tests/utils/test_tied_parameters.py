"""Parameters under several names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from trainer_kit.utils.tied_parameters import names_by_parameter, parameters_by_all_names, tie_again


def test_what_a_move_parts_is_tied_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names = [*names_by_parameter(model).values()]
    assert names == [["0.weight", "1.weight"], ["2.weight"], ["2.bias"]]
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    tie_again(model, names)
    assert model[1].weight is model[0].weight
    assert [*names_by_parameter(model).values()] == names


class Filtering(nn.Module):
    """Overrides `named_parameters` without the option, as torchrl's losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.other = self.one

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        yield from super().named_parameters(prefix, recurse)


@pytest.mark.parametrize("outer", [False, True])
def test_a_class_without_the_option_shows_all_names(outer: bool) -> None:
    model = nn.ModuleDict({"inner": Filtering()}) if outer else Filtering()
    prefix = "inner." if outer else ""
    assert [name for name, _ in parameters_by_all_names(model)] == [f"{prefix}one.weight", f"{prefix}other.weight"]

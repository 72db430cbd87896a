"""Parameters under several names."""

from __future__ import annotations

from torch import nn

from trainer_kit.utils.tied_parameters import names_by_parameter, tie_again


def test_what_a_move_parts_is_tied_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names = [*names_by_parameter(model).values()]
    assert names == [["0.weight", "1.weight"], ["2.weight"], ["2.bias"]]
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    tie_again(model, names)
    assert model[1].weight is model[0].weight
    assert [*names_by_parameter(model).values()] == names

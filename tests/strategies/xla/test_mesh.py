"""Meshes that work cannot be divided over are refused before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit import XLA
from trainer_kit.config import environment


@pytest.mark.parametrize(
    ("mesh", "fsdp", "message"),
    [
        ({"data": 2, "model": 2}, False, "mesh has the axes 'data', 'model'; they may be 'data' and 'fsdp'"),
        ({}, False, "mesh has the axes none; they may be 'data' and 'fsdp'"),
        ({"data": 4}, True, "mesh has the axes 'data'; they must have the axis 'fsdp', and may have 'data'"),
    ],
)
def test_axes_are_data_and_fsdp(mesh: Any, fsdp: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        XLA(mesh=mesh, fsdp=fsdp)


def test_a_mesh_says_how_many_devices_an_axis_has() -> None:
    with pytest.raises(TypeError, match=r"mesh=4 is a int; give the devices by axis, such as \{'data': 4\}"):
        XLA(mesh=4)
    assert XLA(mesh={"data": 2, "fsdp": 4}, fsdp=True).fsdp


def test_parameters_are_divided_on_one_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "place", lambda: environment.Place(1, 2, 0, 1, 1))
    assert not XLA().is_main
    with pytest.raises(ValueError, match="fsdp=True is for one host, but this run has 2"):
        XLA(fsdp=True)

"""Which packages and devices there are."""

from __future__ import annotations

import importlib.util

import pytest

from trainer_kit.accelerator.utils import imports


def test_bitsandbytes_of_a_version() -> None:
    is_installed = importlib.util.find_spec("bitsandbytes") is not None
    assert (imports.is_bnb_available(), imports.is_bnb_available(min_version="0.1")) == (is_installed, is_installed)
    assert not imports.is_bnb_available("999.0")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_is_installed", lambda package: False)
    assert not imports.is_bnb_available("0.1")


def test_numpy_of_a_version() -> None:
    assert imports.is_numpy_available()
    assert not imports.is_numpy_available("999.0")

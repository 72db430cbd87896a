from __future__ import annotations

import sys
import types

import pytest

from trainer_kit.utils.pruning import is_pruned


class TrialPruned(Exception):
    """What optuna raises."""


def test_without_optuna_nothing_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "optuna", raising=False)
    assert not is_pruned(TrialPruned())


def test_only_the_exception_of_optuna_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = types.ModuleType("optuna")
    optuna.TrialPruned = TrialPruned  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    assert is_pruned(TrialPruned())
    assert not is_pruned(ValueError())

"""Which strategies go on in their processes; tests/loop/test_regrouping.py lets them do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit import SingleDevice
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP


def test_a_process_without_others_does_not_regroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_REGROUP_FOLDER", str(tmp_path))
    assert SingleDevice("cpu").regroupable is None
    assert DDP(device="cpu").regroupable is None


@pytest.mark.parametrize("strategy", [DDP, FSDP])
@pytest.mark.parametrize("has_launcher", [True, False])
def test_only_whole_replicas_under_an_elastic_launcher_regroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: type[DDP], has_launcher: bool
) -> None:
    if has_launcher:
        monkeypatch.setenv("TRAINER_KIT_REGROUP_FOLDER", str(tmp_path))
    made = strategy(device="cpu")
    monkeypatch.setattr(type(made.group), "is_own", True)
    assert (made.regroupable is made) == (has_launcher and strategy is DDP)

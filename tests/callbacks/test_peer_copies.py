"""`PeerCopies` requests copies; tests/checkpoint/test_peer_copies.py makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenarios.task import make_trainer

from trainer_kit import Callback, Run
from trainer_kit.callbacks import PeerCopies
from trainer_kit.checkpoint.peer_copies import PeerCopier
from trainer_kit.errors import CallbackError


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "20"])
def test_a_number_of_steps_is_needed(every: Any) -> None:
    with pytest.raises(ValueError, match=f"PeerCopies\\(every={every!r}\\) must be a number of steps of at least 1"):
        PeerCopies(every)


def test_a_folder_is_needed() -> None:
    with pytest.raises(TypeError, match=r"^PeerCopies\(folder=None\) must be the path of a folder in memory"):
        PeerCopies(5, folder=None)  # type: ignore[arg-type]


def test_checkpoints_are_needed(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="PeerCopies needs checkpoints to fall back on"):
        make_trainer(tmp_path, PeerCopies(2, tmp_path), save_strategy="no")


def test_a_folder_that_is_not_there_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", PeerCopies(2, tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"missing'\) cannot be used on rank 0: .*; give a folder in host memory"):
        trainer.train()
    assert trainer.run.state.step == 0


class Patience(Callback):
    """Waits until what a step began is written."""

    def on_step_begin(self, run: Run) -> None:
        if run.state.step:
            self.wait()

    def wait(self) -> None: ...


@pytest.mark.parametrize("accumulation", [1, 2])
def test_copies_are_made_between_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """Every second step; at 4 and 8 a checkpoint is saved, and the run ends at 10."""
    begun = list[int]()
    begin = PeerCopier.begin

    def note(self: PeerCopier, *args: Any) -> None:
        begun.append(self.run.state.step)
        begin(self, *args)

    monkeypatch.setattr(PeerCopier, "begin", note)
    patience = Patience()
    trainer = make_trainer(
        tmp_path / "run", PeerCopies(2, tmp_path), patience, max_steps=10, gradient_accumulation_steps=accumulation
    )

    def wait() -> None:
        loop = trainer._loop
        assert loop is not None
        saver, copier = loop.checkpoints.saver, loop.checkpoints.copier
        assert copier is not None
        copying = copier._copying
        for pending in (saver._pending, None if copying is None else copying.result):
            if pending is not None:
                pending.result(10)

    monkeypatch.setattr(patience, "wait", wait)
    trainer.train()
    assert begun == [2, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "copies end with the run"

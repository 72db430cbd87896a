"""Forward passes in callbacks: with all processes they are as good as others, and one alone is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.block_training import Blocks, arguments, rows, whole_weights
from kit.ranks import RankFailed, on_ranks, try_on_ranks

from trainer_kit import FSDP, Callback, Run, Trainer
from trainer_kit.errors import CallbackError

ROW = {name: value[None] for name, value in rows(1)[0].items()}


class Looks(Callback):
    """Calls the model in step 1 and 2, on all processes or on the main one."""

    def __init__(self, hook: str, alone: bool) -> None:
        self.alone = alone
        self.losses: list[float] = []
        setattr(self, hook, self.look)

    def look(self, run: Run) -> None:
        if run.state.step in (1, 2) and (run.strategy.is_main or not self.alone):
            with torch.no_grad():
                self.losses.append(run.model(**ROW)["loss"].item())


def train(folder: str, alone: bool, hook: str = "on_step_end") -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model, looks = Blocks(), Looks(hook, alone)
    strategy = FSDP(device="cpu", heartbeat_timeout=1.5)
    Trainer(model, arguments(folder, "auto"), rows(13), callbacks=[looks], strategy=strategy).train()
    return looks.losses, whole_weights(model)


@pytest.mark.distributed
def test_passes_of_all_processes_in_a_callback(tmp_path: Path) -> None:
    (losses, weights), other = on_ranks(2, train, str(tmp_path), alone=False)
    assert losses == other[0]
    assert losses[0] != losses[1]
    quiet, unchanged = on_ranks(2, train, str(tmp_path), alone=False, hook="on_train_begin")[0]
    assert quiet == []
    torch.testing.assert_close(weights, unchanged, rtol=0, atol=0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("hook", "there"), [("on_step_end", "s in all_reduce_ints"), ("on_substep_end", "s in all_gather")]
)
def test_a_pass_of_one_process_is_refused(tmp_path: Path, hook: str, there: str) -> None:
    """Between two micro-batches, the other process waits in a forward pass of its own, which gathers other weights."""
    first, second = try_on_ranks(2, train, str(tmp_path), alone=True, hook=hook)
    sentence = "rank 0 calls the model outside of the Trainer's own passes, but rank 1 ("
    assert isinstance(first, RankFailed)
    assert isinstance(first.error, CallbackError)
    assert sentence in str(first.error)
    assert there in str(first.error)
    assert str(first.error).endswith("so call the model on all of them")
    assert isinstance(second, RankFailed)
    assert "it ended with exit code 1" in str(second)  # the heartbeat ends it, since rank 0's connections stay open

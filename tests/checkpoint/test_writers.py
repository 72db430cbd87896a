"""A checkpoint that several processes write at once, and one that a process cannot take part in."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from kit.parts import parts_of
from kit.ranks import on_ranks

from trainer_kit.checkpoint import Snapshot, read_state, take_snapshot, verify
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.checkpoint.writers import Writers
from trainer_kit.strategies.ddp import DDP


@parts_of(500)
def write(folder: Path, case: str) -> tuple[str, list[int]]:
    """The folder or the error, and the ranks that write from then on."""
    strategy = DDP(device="cpu")
    strategy.setup()
    snapshot: Future[Snapshot] = Future()
    rows = 30 if strategy.rank == 1 and case == "differs" else 40
    if strategy.rank == (0 if case == "main fails" else 1) and case.endswith("fails"):
        snapshot.set_exception(TypeError("it holds a lambda"))
    else:
        weights = {name: torch.full((rows, 3), number) for number, name in enumerate("abcd")}
        states = {"optimizer": {"sum": torch.arange(50)}, "own": {"rank": strategy.rank}}
        models = {"model_1": {"other": torch.ones(60, 2)}}
        snapshot.set_result(take_snapshot(7, weights, states, arguments={}, more_models=models))
    writers = Writers(strategy, ["optimizer"], "5GB")
    writers.ranks = [0, 1]
    try:
        return str(writers.write_now(folder / "given", snapshot, lambda: None)), writers.ranks
    except TypeError as error:
        return str(error), writers.ranks


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "parts"), [("alike", 2), ("differs", 1), ("another fails", 1)])
def test_processes_write_together_or_the_main_one_alone(tmp_path: Path, case: str, parts: int) -> None:
    assert on_ranks(2, write, tmp_path, case) == [(str(tmp_path / "given"), [0, 1][:parts])] * 2
    verify(tmp_path / "given")
    assert len([*(tmp_path / "given").glob("model[.-]*safetensors")]) == parts
    model = torch.nn.Module()
    for name in "abcd":
        model.register_buffer(name, torch.zeros(40, 3, dtype=torch.int64))
    load_weights(model, tmp_path / "given", is_verified=False)
    assert [int(each.sum()) // 120 for each in model.buffers()] == [0, 1, 2, 3]
    assert read_state(tmp_path / "given", "own") == {"rank": 0}
    assert [each.name for each in tmp_path.iterdir()] == ["given"]


@pytest.mark.distributed
def test_an_error_of_the_main_process_is_raised_on_all(tmp_path: Path) -> None:
    assert {text for text, _ in on_ranks(2, write, tmp_path, "main fails")} == {"it holds a lambda"}
    assert not [*tmp_path.iterdir()]

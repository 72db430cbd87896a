from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit.callbacks import Profiler
from trainer_kit.run import Run


def profile(run: Run, callback: Profiler, steps: int, how: str = "on_train_end") -> None:
    for _ in range(steps):
        callback.on_step_begin(run)
        run.model(torch.randn(8, 4)).sum().backward()
        run.state.step += 1
        callback.on_step_end(run)
    getattr(callback, how)(run, *([ValueError()] if how == "on_exception" else []))


def recorded_steps(path: Path) -> int:
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event["name"] == "aten::addmm" for event in events)
    return len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")})


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (3, 5)])
def test_the_steps_asked_for(make_run: Callable[..., Run], start: int, stop: int) -> None:
    run = make_run()
    profile(run, Profiler(start, stop), 7)
    folder = Path(run.args.output_dir) / "profile"
    assert {path.name for path in folder.iterdir()} == {f"steps-{start}-{stop}.json", f"steps-{start}-{stop}.txt"}
    assert recorded_steps(folder / f"steps-{start}-{stop}.json") == stop - start + 1
    table = (folder / f"steps-{start}-{stop}.txt").read_text()
    assert "aten::addmm" in table
    assert "Self CPU" in table


@pytest.mark.parametrize("how", ["on_train_end", "on_exception"])
def test_a_run_that_ends_before_writes_what_there_is(make_run: Callable[..., Run], tmp_path: Path, how: str) -> None:
    profile(make_run(), Profiler(2, 50, directory=tmp_path), 4, how)
    assert recorded_steps(tmp_path / "steps-2-50.json") >= 2


def test_a_run_that_never_gets_there_writes_nothing(make_run: Callable[..., Run], tmp_path: Path) -> None:
    profile(make_run(), Profiler(20, 21, directory=tmp_path), 4)
    assert list(tmp_path.iterdir()) == []


def test_other_processes_record_nothing(make_run: Callable[..., Run], tmp_path: Path) -> None:
    profile(make_run(rank=1), Profiler(2, 3, directory=tmp_path), 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"start": 1}, {"start": 5, "stop": 4}])
def test_steps_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="start"):
        Profiler(**options)

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callback import Callback
from trainer_kit.callbacks import Profiler
from trainer_kit.run import Run
from trainer_kit.strategies.single import SingleDevice


def profile(run: Run, callback: Profiler, steps: int, how: str = "on_train_end") -> None:
    callback.on_train_begin(run)
    for _ in range(steps):
        callback.on_step_begin(run)
        run.ledger.enter("forward")
        loss = run.model(torch.randn(8, 4)).sum()
        run.ledger.enter("backward")
        loss.backward()
        run.state.step += 1
        run.ledger.enter("callback/Profiler")
        callback.on_step_end(run)
        run.ledger.enter("loop")
    getattr(callback, how)(run, ValueError() if how == "on_exception" else None)


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def recorded_steps(path: Path) -> list[int]:
    names = {event["name"] for event in events(path)}
    assert "aten::addmm" in names
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


@pytest.mark.parametrize(("start", "stop"), [(1, 1), (1, 3), (2, 2), (3, 5)])
def test_the_steps_asked_for(make_run: Callable[..., Run], start: int, stop: int) -> None:
    run = make_run()
    profile(run, Profiler(start, stop), 7)
    folder = Path(run.args.output_dir) / "profile"
    assert {path.name for path in folder.iterdir()} == {f"steps-{start}-{stop}.json", f"steps-{start}-{stop}.txt"}
    assert recorded_steps(folder / f"steps-{start}-{stop}.json") == list(range(start, stop + 1))
    assert run.ledger._range is None
    table = (folder / f"steps-{start}-{stop}.txt").read_text()
    assert "aten::addmm" in table
    assert "Self CPU" in table
    assert "test_profiler.py" not in table  # of operators, not of Python's functions
    assert "ProfilerStep" not in table  # and not of ranges
    assert not re.search(r"\s-\d", table)  # no time is negative
    rows = [line for line in table.splitlines() if "::" in line or "Backward" in line]
    assert 5 < len(rows) <= 20


@pytest.mark.parametrize("how", ["on_train_end", "on_exception"])
def test_a_run_that_ends_before_writes_what_there_is(make_run: Callable[..., Run], tmp_path: Path, how: str) -> None:
    profile(make_run(), Profiler(2, 50, directory=tmp_path), 4, how)
    assert recorded_steps(tmp_path / "steps-2-50.json")[:3] == [2, 3, 4]


@pytest.mark.parametrize("start", [20, 5])
def test_a_run_that_never_gets_there_writes_nothing(make_run: Callable[..., Run], tmp_path: Path, start: int) -> None:
    callback, run = Profiler(start, 21, directory=tmp_path), make_run()
    callback.on_train_begin(run)
    run.state.step = 3
    callback.on_step_begin(run)  # step 4 makes step 5 ready
    callback.on_train_end(run, None)
    assert list(tmp_path.iterdir()) == []
    profile(make_run(), Profiler(1, 1, directory=tmp_path), 1)  # and others can record


def test_each_process_writes_its_own(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run(rank=1)
    run.strategy.collectives.world_size = 2
    profile(run, Profiler(2, 3, directory=tmp_path), 4)
    assert {path.name for path in tmp_path.iterdir()} == {"steps-2-3-rank-1.json", "steps-2-3-rank-1.txt"}


def test_a_folder_that_cannot_be_written_to(
    make_run: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        profile(make_run(), Profiler(1, 1, directory=tmp_path / "file"), 2)
    assert "steps-1-1.json could not be written: File exists; training continues" in caplog.text


@pytest.mark.parametrize("options", [{"start": 0}, {"start": 5, "stop": 4}])
def test_steps_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="start"):
        Profiler(**options)


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def distance_to_one(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(**batch) - 1).square().mean()


class Onlooker(Callback):
    def on_step_begin(self, run: Run) -> None:
        torch.zeros(3)


def trained(folder: Path, **arguments: Any) -> Path:
    """The trace of a training of 4 steps."""
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, use_cpu=True, report_to="none", save_strategy="no", **arguments
    )
    data = [{"x": torch.randn(4)} for _ in range(32)]
    Trainer(Tower(), args, data, compute_loss=distance_to_one, callbacks=[Onlooker()]).train()
    return folder / "profile" / f"steps-{args.profile.replace(':', '-')}.json"  # type: ignore[union-attr]


def test_the_users_code_is_in_the_trace(tmp_path: Path) -> None:
    trace = trained(tmp_path, profile="1:3")
    assert recorded_steps(trace) == [1, 2, 3]
    names = {event["name"] for event in events(trace)}
    assert {"data", "forward", "backward", "optimizer", "callback/Onlooker"} <= names
    assert "nn.Module: Tower_0" in names
    for function in (distance_to_one, Onlooker.on_step_begin):
        place = f"test_profiler.py({function.__code__.co_firstlineno}): {function.__name__}"
        assert any(name.endswith(place) for name in names), place


def test_the_events_of_a_track_are_nested(tmp_path: Path) -> None:
    """Else Perfetto leaves some out, without a word in the trace: those that a person looks for first."""
    tracks = defaultdict(list)
    found = events(trained(tmp_path, profile="2:3"))
    for event in found:
        assert event["ph"] in "XMsfi"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for track in tracks.values():
        open_ends: list[float] = []
        for begin, length, name in sorted(track):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or begin - length <= open_ends[-1] + 1e-3, name
            open_ends.append(begin - length)
    named = {event["tid"] for event in found if event["ph"] == "M" and event["args"].get("name") == "activities"}
    assert named == {event["tid"] for event in found if event.get("cat") == "user_annotation"}


@pytest.mark.parametrize(("backend", "expected"), [("native", ["python", "snapshot", None]), ("cudaMallocAsync", [])])
def test_the_allocators_history_is_kept_for_these_steps_alone(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, backend: str, expected: list[Any]
) -> None:
    """Only PyTorch's own allocator has one; the others raise."""
    seen: list[Any] = []

    def record(enabled: str | None = "all", stacks: str | None = None) -> None:
        seen.append(enabled and stacks)

    def dump(path: str) -> None:
        seen.append("snapshot")
        Path(path).touch()

    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    run = make_run()
    run.strategy.device = torch.device("cuda")
    profile(run, Profiler(2, 3), 4)
    assert seen == expected
    assert (Path(run.args.output_dir) / "profile" / "steps-2-3.pickle").exists() is bool(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_memory_of_a_gpu(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=4, report_to="none", save_strategy="no", profile="2:3")
    data = [{"x": torch.randn(4)} for _ in range(32)]
    Trainer(Tower(), args, data, compute_loss=distance_to_one, strategy=SingleDevice("cuda")).train()
    snapshot = tmp_path / "profile" / "steps-2-3.pickle"
    assert b"device_traces" in snapshot.read_bytes()
    assert b"distance_to_one" in snapshot.read_bytes()
    assert "Self CUDA" in snapshot.with_suffix(".txt").read_text()
    assert any(event.get("cat") == "kernel" for event in events(snapshot.with_suffix(".json")))

"""The slowest process is named, and its machine replaced where that is asked for."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callbacks import JsonLines, SlowProcesses, read_log, slow_processes
from trainer_kit.config import environment
from trainer_kit.run import Run
from trainer_kit.strategies.session import REPLACE


class Compared:
    """A run of several processes, of which this one is `rank`; the others' times are given."""

    def __init__(self, run: Run, callback: SlowProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.callback, self._monkeypatch = run, callback, monkeypatch
        self.seconds = {"setup": 5.0}
        monkeypatch.setattr(run.strategy.collectives, "world_size", 4)
        monkeypatch.setattr(type(run.strategy.collectives), "is_alone", False)
        monkeypatch.setattr(run.ledger, "seconds", lambda: dict(self.seconds))
        callback.on_train_begin(run)

    def record(self, own: Sequence[float], steps: int = 100, backward: float = 10.0) -> dict[str, Any]:
        """The metrics of a record after `steps` steps in which each rank spent `own` ms on data and 2 ms in forward."""
        rank, here = self.run.strategy.rank, {"backward": backward, "loop": 3.0, "logging": 7.0}
        paces = [
            slow_processes._Pace(f"machine-{each}", {"data": ms / 1e3, "forward": 2e-3}, (ms + 2 + backward) / 1e3)
            for each, ms in enumerate(own)
        ]
        for name, ms in {"data": own[rank], "forward": 2.0, **here}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + ms * steps / 1e3
        self.run.state.step += steps

        def gather(pace: slow_processes._Pace) -> list[slow_processes._Pace]:
            assert pace.by_activity == pytest.approx(paces[rank].by_activity)
            assert pace.step == pytest.approx(paces[rank].step + 3e-3), "the loop's own time is a part of the step"
            return paces

        self._monkeypatch.setattr(self.run.strategy.collectives, "gather_object", gather)
        return self.callback.metrics(self.run)


@pytest.fixture
def compare(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compared]:
    def make(rank: int = 0, **options: Any) -> Compared:
        return Compared(make_run(rank=rank), SlowProcesses(**options), monkeypatch)

    return make


def test_the_slowest_is_named(compare: Callable[..., Compared], caplog: pytest.LogCaptureFixture) -> None:
    compared = compare()
    with caplog.at_level(logging.WARNING):
        assert compared.record([1, 1, 4, 1]) == {"slowest_rank": 2, "slowest_ratio": pytest.approx(2.0)}
    assert caplog.messages == [
        "rank 2 on machine-2 takes 2.0 times as long for its own part of a step as the median process (0.006 s instead "
        "of 0.003 s, mostly for data, over 100 steps), and all others wait for it"
    ]


def test_the_warning_comes_again_after_twice_the_steps(
    compare: Callable[..., Compared], caplog: pytest.LogCaptureFixture
) -> None:
    compared, warned = compare(), []
    with caplog.at_level(logging.WARNING):
        for _ in range(16):
            before = len(caplog.messages)
            compared.record([1, 1, 4, 1])
            if len(caplog.messages) > before:
                warned.append(compared.run.state.step)
    assert warned == [100, 300, 700, 1500]


@pytest.mark.parametrize(
    ("own", "backward"),
    [([1, 1, 1, 1.5], 10.0), ([1, 1, 4, 1], 100.0), ([4, 4, 4, 4], 1.0)],
    ids=["within 1.3", "little of a step", "all alike"],
)
def test_a_small_difference_is_recorded_only(
    compare: Callable[..., Compared], caplog: pytest.LogCaptureFixture, own: list[float], backward: float
) -> None:
    with caplog.at_level(logging.WARNING):
        figures = compare().record(own, backward=backward)
    assert figures["slowest_ratio"] == pytest.approx((max(own) + 2) / (sorted(own)[1] + 2))
    assert not caplog.messages


def test_only_the_main_process_warns(compare: Callable[..., Compared], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert compare(rank=2).record([1, 1, 4, 1])["slowest_rank"] == 2
    assert not caplog.messages


def test_a_hundred_steps_pass_first(compare: Callable[..., Compared]) -> None:
    compared = compare()
    assert compared.record([1, 1, 4, 1], steps=99) == {}
    assert compared.record([1, 1, 4, 1], steps=1) != {}
    assert compared.record([1, 1, 4, 1], steps=1) == {}
    compared.run.state.step = 30  # after a rollback
    assert compared.callback.metrics(compared.run) == {}
    assert compared.record([1, 1, 4, 1]) != {}


def test_a_lone_process_compares_nothing(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), SlowProcesses()
    callback.on_train_begin(run)
    run.state.step = 1000
    assert callback.metrics(run) == {}


@pytest.mark.parametrize(("rank", "is_asked"), [(2, True), (1, False)])
def test_the_slow_machine_asks_for_its_replacement(
    compare: Callable[..., Compared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, is_asked: bool
) -> None:
    monkeypatch.setenv(environment.PROGRESS_FILE, str(tmp_path / "progress"))
    compared = compare(rank=rank, replace_from=1.5)
    compared.record([1, 1, 2, 1])
    assert not (tmp_path / REPLACE).exists(), "below the ratio"
    compared.record([1, 1, 4, 1])
    assert (tmp_path / REPLACE).exists() == is_asked


@pytest.mark.parametrize("ratio", [1.0, math.inf, math.nan, "1.5"])
def test_a_ratio_that_all_processes_reach_or_none_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=f"^replace_from={re.escape(repr(ratio))} must be a ratio above 1"):
        SlowProcesses(replace_from=ratio)


class SlowOnOne(torch.utils.data.Dataset[Any]):
    """Samples that take 5 ms on rank 1."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if environment.place().rank == 1:
            time.sleep(0.005)
        return {"x": torch.full((4,), float(index)), "labels": torch.ones(1)}


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": torch.nn.functional.mse_loss(super().forward(x), labels)}


def train(folder: str) -> list[dict[str, Any]]:
    slow_processes._LEAST_STEPS = 10
    try:
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, num_train_epochs=1, logging_steps=12, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True, log_level="error",
        )  # fmt: skip
        Trainer(Net(4, 1), args, SlowOnOne(), callbacks=[JsonLines()]).train()
        return read_log(Path(folder) / "log.jsonl")
    finally:
        slow_processes._LEAST_STEPS = 100


@pytest.mark.distributed
def test_two_processes_find_the_slower_one(tmp_path: Path) -> None:
    records, _ = on_ranks(2, train, str(tmp_path))
    (compared,) = [record for record in records if "slowest_rank" in record]
    assert compared["slowest_rank"] == 1
    assert compared["slowest_ratio"] > 2

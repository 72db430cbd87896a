from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import read_log
from trainer_kit.data.workers import worker_items

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are killed")

LIMIT = 30.0


class Pids:
    """Samples that name the process which reads them."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1), "pid": torch.tensor(os.getpid() if get_worker_info() else 0)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.worker = 0

    def forward(self, x: torch.Tensor, pid: torch.Tensor) -> torch.Tensor:
        self.worker = int(pid[0])
        return self.layer(x).square().mean()


def kill(pid: int) -> None:
    """Kill a child, and wait until this process has handled the signal."""
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + LIMIT
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(0.01)


class Reporter(Callback):
    """Kills a data worker while it reports a step's losses."""

    is_reporter = True
    goes_on = False

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if run.state.step == 3:
            kill(run.model.worker)  # type: ignore[arg-type]
            self.goes_on = True


def test_a_worker_that_dies_while_a_callback_reports_ends_the_run_at_the_next_batch(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=100, logging_steps=1, per_device_train_batch_size=1, save_strategy="no",
        dataloader_num_workers=1, use_cpu=True, report_to="jsonl", disable_tqdm=True, log_level="critical",
    )  # fmt: skip
    reporter = Reporter()
    trainer = Trainer(Model(), args, Pids(), callbacks=[reporter])
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        trainer.train()
    assert reporter.goes_on
    steps = [record["step"] for record in read_log(tmp_path / "log.jsonl") if record["event"] == "log"]
    assert steps in ([1, 2, 3], [1, 2, 3, 4])  # a batch is read ahead


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Pids(), num_workers=1, batch_size=1, **settings)


def items(**settings: Any) -> tuple[Iterator[Any], int]:
    """Return the rest of a worker's items, and its process."""
    rest = worker_items(loader(**settings))
    return rest, int(next(rest)["pid"])


def test_a_death_is_raised_by_the_reader_of_that_worker_only() -> None:
    first, worker = items()
    second, _ = items()
    kill(worker)
    next(second)
    with pytest.raises(RuntimeError, match=f"worker \\(pid {worker}\\) is killed"):
        next(first)
    next(second)
    second.close()  # type: ignore[attr-defined]


def test_a_death_that_comes_while_the_main_thread_waits_for_a_batch_is_raised_there() -> None:
    class Slow(Pids):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            time.sleep(LIMIT if index else 0.0)
            return super().__getitem__(index)

    rest = worker_items(DataLoader(Slow(), num_workers=1, batch_size=1))  # type: ignore[arg-type]
    worker = int(next(rest)["pid"])
    threading.Timer(0.2, os.kill, (worker, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"\\(pid\\(s\\) {worker}\\) exited unexpectedly"):
        next(rest)
    assert time.monotonic() - began < LIMIT / 2


def test_deaths_of_other_loaders_are_raised_as_torch_does() -> None:
    rest, _ = items()
    other = iter(loader())
    worker = int(next(other)["pid"])
    with pytest.raises(RuntimeError, match="is killed"):
        kill(worker)
    next(rest)
    rest.close()  # type: ignore[attr-defined]


def test_a_handler_is_installed_once() -> None:
    for _ in range(2):
        rest, _ = items()
        handler = signal.getsignal(signal.SIGCHLD)
        rest.close()  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.mark.slow
def test_a_death_between_two_passes_of_workers_that_persist_is_raised_in_the_second() -> None:
    persistent = DataLoader(Pids(), num_workers=1, batch_size=200, persistent_workers=True)  # type: ignore[arg-type]
    *_, last = worker_items(persistent)
    kill(int(last["pid"][0]))
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(worker_items(persistent))


def test_a_death_does_not_keep_what_was_under_way() -> None:
    rest, worker = items()
    model = Model()
    alive = weakref.ref(model)
    try:
        raise KeyError(model)
    except KeyError:
        kill(worker)
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="is killed") as raised:
        next(rest)
    assert raised.value.__context__ is None

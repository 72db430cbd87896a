"""Several hosts of a TPU, each one process: to the loop they are one. Here each host has devices of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import xla_task
from kit.on_xla import QUICK, on_cpu, on_xla

from trainer_kit import XLA, Callback, Run
from trainer_kit.checkpoint import contribution
from trainer_kit.config import environment

pytestmark = pytest.mark.xla


class At(Callback):
    """Does something after a step, on one host."""

    def __init__(self, host: int, step: int, action: Callable[[Run], Any]) -> None:
        self.host, self.step, self.action = host, step, action

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step and isinstance(run.strategy, XLA) and run.strategy.group.place.rank == self.host:
            self.action(run)


def host(rank: int, port: int, folder: Path, callback: Callback | None, changes: dict[str, Any]) -> None:
    """One host: as the TPU's variables would name it, with two devices of XLA's CPU client, which joins no hosts."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": QUICK}
    place = environment.Place(rank, 2, 0, 1, rank, "127.0.0.1", port)
    environment.place = lambda: place
    environment.check_drives_machine_alone = lambda: None
    callbacks = [] if callback is None else [callback]
    (here := folder / f"host {rank}").mkdir(exist_ok=True)
    os.chdir(here)
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer = xla_task.make_trainer(Path("run"), strategy=XLA(), dropout=0.1, callbacks=callbacks, **(saving | changes))
    end: Any = 0
    try:
        trainer.train(resume_from_checkpoint=True)
    except (SystemExit, ValueError) as error:
        end = error.code if isinstance(error, SystemExit) else str(error)
    torch.save((end, trainer.run.state.step, xla_task.weights(trainer)), folder / f"end-{rank}.pt")


def both(folder: Path, callback: Callback | None = None, changes: Any = ({}, {})) -> None:
    """Runs two hosts to their end, each with its own changes of the arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context: Any = multiprocessing.get_context("fork")
    hosts = [context.Process(target=host, args=(rank, port, folder, callback, changes[rank])) for rank in range(2)]
    for process in hosts:
        process.start()
    for process in hosts:
        process.join(150)
    assert [process.exitcode for process in hosts] == [0, 0]


def alone(folder: Path) -> dict[str, torch.Tensor]:
    trainer = xla_task.make_trainer(folder, strategy=XLA(), dropout=0.1)
    trainer.train()
    return xla_task.weights(trainer)


def ends(folder: Path) -> list[tuple[Any, int, dict[str, torch.Tensor]]]:
    return [torch.load(folder / f"end-{rank}.pt") for rank in range(2)]


class Writes(Callback):
    """Records which hosts write files of a checkpoint."""

    def on_train_begin(self, run: Run) -> None:
        assert isinstance(run.strategy, XLA)
        write, rank = contribution.write_part, run.strategy.group.place.rank

        def recorded(staging: Path, *args: Any, **kwargs: Any) -> Any:
            Path(f"wrote-{rank}").touch()
            return write(staging, *args, **kwargs)

        contribution.write_part = recorded


@pytest.mark.parametrize("asynchronous", [True, False])
def test_host_0_alone_writes(tmp_path: Path, asynchronous: bool) -> None:
    on_cpu(both, tmp_path, Writes(), 2 * ({"async_save": asynchronous},))
    assert [path.name for path in tmp_path.glob("*/wrote-*")] == ["wrote-0"]


def test_hosts_leave_together_and_go_on_as_one(tmp_path: Path) -> None:
    expected = on_xla(2, alone, tmp_path / "alone")

    # Only one host is told.
    on_cpu(both, tmp_path, At(1, 3, lambda run: os.kill(os.getpid(), signal.SIGTERM)))
    (code_0, step_0, _), (code_1, step_1, _) = ends(tmp_path)
    assert (code_0, code_1) == (143, 143)
    assert step_0 == step_1 == 3
    # Host 0 alone writes.
    assert (tmp_path / "host 0" / "run" / "checkpoint-3" / "manifest.json").is_file()
    assert not list(tmp_path.glob("host 1/*"))

    (tmp_path / "host 1" / "run").symlink_to(tmp_path / "host 0" / "run")  # as on a disk that both see
    on_cpu(both, tmp_path)
    for code, step, weights in ends(tmp_path):
        assert code == 0
        assert step == 8
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0)
    records = [json.loads(line) for line in (tmp_path / "host 0/run/log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [3, 6, 8], records


def test_a_host_that_differs_is_found(tmp_path: Path) -> None:
    on_cpu(both, tmp_path, None, ({}, {"weight_decay": 0.2}))
    for end, step, _ in ends(tmp_path):
        assert end.startswith("weight_decay differs: 0.2 on rank 1, 0.1 on rank 0")
        assert step == 0


def test_a_host_that_does_not_know_of_the_others_is_refused() -> None:
    def refused() -> str:
        from torch_xla import runtime

        runtime.device_type, runtime.process_count = lambda: "TPU", lambda: 4
        with pytest.raises(ValueError, match="the TPU has 4 hosts, but this process knows of 1") as error:
            XLA().setup()
        return str(error.value)

    assert "--num-nodes" in on_xla(1, refused)

"""A training of several machines, of which some are lost, come again or leave while the others train on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scenarios import machine_task, task
from scenarios.machines import ADDRESSES, HOSTS, Command, Ended, Machines

from trainer_kit.callbacks import read_log

TASK = Path(machine_task.__file__)
EPOCHS = 2


class Elastic:
    """A training of several machines that counts how often it trains each sample.

    Args:
        machines: Where it trains.
        folder: A folder that all of them see.

    Attributes:
        run: The output folder.
        candidates: Number of machines that can serve the store.
    """

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.run, self.marks = folder / "run", folder / "marks"
        self.marks.mkdir(parents=True)
        self.candidates = 1
        self.commands: list[Command] = []

    def start(
        self,
        number: int,
        nodes: str = "2:3",
        timeout: int = 60,
        pause: float = 0.3,
        preloaded: bool = True,
        dies: str = "never",
        victim: int = 2,
        deaths: Sequence[tuple[int, str]] = (),
        model: str = "counts",
        batch_size: int = 2,
        slow: str = "",
        heartbeat: float | None = None,
        last_call: float = 30,
        restarts: str = "",
        copies: bool = False,
        fsdp: bool = False,
    ) -> Command:
        candidates = ",".join(ADDRESSES[: self.candidates])
        place = ["--num-nodes", nodes, "--num-processes", nodes[-1], "--master-addr", candidates]
        limits = ["--master-port", "29517", "--start-timeout", str(timeout), "--last-call", str(last_call), "--cpu"]
        limits += ["--max-restarts", restarts] if restarts else []
        options = ["--model", model, "--batch-size", str(batch_size), "--pause", str(pause), "--marks", self.marks]
        for dying, moment in [*deaths, *([(victim, dies)] if dies != "never" else [])]:
            options += ["--dies", HOSTS[dying], moment]
        options += ["--slow", slow] if slow else []
        options += ["--copies", "memory"] if copies else []
        options += ["--fsdp"] if fsdp else []
        options += ["--heartbeat", str(heartbeat)] if heartbeat is not None else []
        words = ["-m", "trainer_kit", "launch", *place, *limits, TASK, self.run, *options]
        self.commands.append(self.machines.start(number, *words, preloaded=preloaded))
        return self.commands[-1]

    def start_all(self, **changes: Any) -> list[Command]:
        commands = [self.start(number, **changes) for number in range(len(self.machines.names))]
        self.wait_for_step(5, commands[0])
        return commands

    def steps(self) -> set[int]:
        """Numbers of the steps that any process has taken."""
        return {int(mark.name.rpartition("-")[2]) for mark in self.marks.iterdir()}

    def wait_for_step(self, step: int, command: Command) -> None:
        end = time.monotonic() + 120
        while not any(number >= step for number in self.steps()):
            assert command.is_running(), command.err.read_text()
            assert time.monotonic() < end, command.err.read_text()
            time.sleep(0.02)

    def wait_for_text(self, text: str, *commands: Command) -> None:
        """Wait until one of the commands has written a text."""
        end = time.monotonic() + 120
        while not any(text in command.err.read_text() for command in commands):
            errors = "\n".join(command.err.read_text() for command in commands)
            assert any(command.is_running() for command in commands), errors
            assert time.monotonic() < end, errors
            time.sleep(0.02)

    def processes(self) -> set[int]:
        """IDs of all processes that have taken a step."""
        return {int(mark.read_text()) for mark in self.marks.iterdir()}

    def memberships(self) -> list[dict[str, Any]]:
        """The log's records of changed memberships."""
        return [record for record in read_log(self.run / "log.jsonl") if record["event"] == "membership"]

    def check(self, *ended: Ended) -> None:
        """Each sample of each epoch was trained once."""
        for each in ended:
            assert each.code == 0, each.err
            weights = json.loads(each.out)["weights"]
            assert weights == [-float(EPOCHS)] * task.SAMPLES, each.err

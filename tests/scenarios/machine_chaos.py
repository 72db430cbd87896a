"""Kills machines of a training at random moments and starts them again, until it is finished.

By hand, for as long as wanted::

    python tests/scenarios/machine_chaos.py --kills 100 --seed 7

Each machine is started again whenever its launcher has ended, as Kubernetes does. It prints what it does, and exits
with 1 where the training did not end by itself, or did not use each sample of each epoch once.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios.elastic import Elastic
from scenarios.machines import HOSTS, Command, Ended, finish, made_machines

from trainer_kit.callbacks import read_log

MACHINES = 4
TOLD = 0.25
"""Share of the machines that are told to leave; the others are killed."""

TWICE = 0.25
"""Share of the losses of two of all machines at the same time, of which the other half goes on."""

SAVE_STEPS = 3
"""Steps from one checkpoint to the next, as in `machine_task`."""

_LIMIT = 90.0  # seconds without a step
_DOWN = 0.2, 2.0
_BETWEEN = 1.0, 4.0


class Rage:
    """A training on machines of which one after the other is lost and comes again.

    Args:
        elastic: The training.
        seed: Seed of the moments.
        say: Shows a line.
    """

    def __init__(self, elastic: Elastic, seed: int, say: Callable[[str], object] = print) -> None:
        self.elastic, self.random, self.say = elastic, random.Random(seed), say
        self.pause = 0.0
        self.begin = time.monotonic()
        self.current: list[Command] = []
        self.lost, self._lost_at = 0, 0.0
        self._back_at: dict[int, float] = {}  # machines that are down

    def run(self, kills: int) -> list[Ended]:
        """Return the ends of the launchers that the training has ended with."""
        self.pause = 0.06 * kills  # so that the run is long enough for them
        self.current = [self._start(number) for number in range(MACHINES)]
        self.elastic.wait_for_step(2, self.current[0])
        due = time.monotonic() + self.random.uniform(*_BETWEEN)
        while not (ended := [each for each in self.current if self._is_finished(each)]):
            now = time.monotonic()
            self._bring_back(now)
            if now >= due and self.lost < kills and self._newest_step() > self._lost_at:
                several = 2 if self._members() == MACHINES and self.random.random() < TWICE else 1
                for number in self.random.sample(range(MACHINES), several):
                    self._lose(number)
                due = now + self.random.uniform(*_BETWEEN)
            assert time.time() - self._newest_step() < _LIMIT, self.texts()
            time.sleep(0.05)
        self.say(f"{now - self.begin:.1f} s: finished, {self.lost} machines lost")
        return finish(*ended)

    def _newest_step(self) -> float:
        """The time of the last step: after a loss, it shows that the others go on, so that one more may be lost."""
        return max(mark.stat().st_mtime for mark in self.elastic.marks.iterdir())

    def _members(self) -> int:
        """The number of machines that train, as their launchers say."""
        found = [re.findall(rf"(\d) of {MACHINES} machines", each.err.read_text()) for each in self.current]
        return min((int(counts[-1]) for counts in found if counts), default=1)

    def texts(self) -> str:
        """What all launchers have written."""
        return "\n".join(f"{each.name}: {each.err.read_text()}" for each in self.elastic.commands)

    def _start(self, number: int) -> Command:
        limits = {"timeout": 8, "heartbeat": 4, "last_call": 1, "restarts": "1000/1h"}
        return self.elastic.start(number, nodes=f"1:{MACHINES}", batch_size=1, pause=self.pause, **limits)

    def _lose(self, number: int) -> None:
        if number in self._back_at or not self.current[number].is_running() or self._members() == 1:
            return
        self.lost, self._lost_at = self.lost + 1, time.time()
        if self.random.random() < TOLD:
            self.say(f"{time.monotonic() - self.begin:.1f} s: {HOSTS[number]} is told to leave")
            self.current[number].process.send_signal(signal.SIGTERM)
            return
        self.say(f"{time.monotonic() - self.begin:.1f} s: {HOSTS[number]} is killed")
        self.elastic.machines.kill(number)
        self._back_at[number] = time.monotonic() + self.random.uniform(*_DOWN)

    def _bring_back(self, now: float) -> None:
        for number, command in enumerate(self.current):
            if not command.is_running() and not self._is_finished(command):
                back_at = self._back_at.setdefault(number, now + self.random.uniform(*_DOWN))
                if now >= back_at:
                    self.say(f"{now - self.begin:.1f} s: {HOSTS[number]} comes again")
                    del self._back_at[number]
                    self.current[number] = self._start(number)

    def _is_finished(self, command: Command) -> bool:
        return not command.is_running() and command.process.wait() == 0 and bool(command.out.read_text())


def count_repeats(records: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """Return how many steps a run has taken again, how many it may at most by design, and how many it has.

    Processes that go on after a loss take the step under way again. New ones resume from the newest checkpoint, which
    is one save and the next one back, since a save is made before the next one begins; a loss may break it off.

    Raises:
        AssertionError: If a start has left the newest checkpoint aside, or the run has counted other steps.
    """
    newest = again = allowed = saved = broken_off = 0
    for record, after in zip(records, [*records[1:], {}], strict=True):
        event = record["event"]
        if "learning_rate" in record:
            again += record["step"] <= newest
            newest = max(newest, record["step"])
        elif event == "save":
            saved, broken_off = record["step"], 0
        elif event == "membership" and record["in_process"]:
            assert record["again"] <= 1, record
            allowed, broken_off = allowed + 1, broken_off + 1
        elif event == "start" and newest and not after.get("in_process"):  # else a new main process begins to log
            assert record["step"] >= saved, record
            assert newest - record["step"] <= SAVE_STEPS * (2 + broken_off), record
            allowed += min(newest, SAVE_STEPS * (2 + broken_off))
    (summary,) = (record for record in records if "wall_seconds" in record)
    counted: int = summary.get("steps_again", again)  # a new launch of the same machines is no change of them
    assert again <= counted <= allowed, (again, summary, allowed)
    return counted, allowed, newest


def rage(folder: Path, kills: int, seed: int, say: Callable[[str], object] = print) -> None:
    """Let a training outlive `kills` losses of machines.

    Raises:
        AssertionError: If it stands still, a sample is not used exactly once in each epoch, more steps are taken again
            than by design, or a process is left over.
    """
    with made_machines(folder, MACHINES) as machines:
        elastic = Elastic(machines, folder / "shared")
        elastic.candidates = MACHINES
        chaos = Rage(elastic, seed, say)
        ended = chaos.run(kills)
        elastic.check(*ended)
        again, allowed, steps = count_repeats(read_log(elastic.run / "log.jsonl"))
        assert again <= allowed, chaos.texts()
        say(f"goodput in steps: {steps / (steps + again):.1%}, by design at least {steps / (steps + allowed):.1%}")
        assert chaos.lost >= kills // 2, f"only {chaos.lost} machines were lost: the run is too short"
        finish(*chaos.current, within=60)  # the others hear of it, or miss the store
        for name in machines.names:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
            assert not left.split(), chaos.texts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rage(Path(folder), options.kills, options.seed)


if __name__ == "__main__":
    main()

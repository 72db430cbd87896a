"""`Verification`: starts a script several times, kills one start, resumes it, and compares their records."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trainer_kit.errors import ScriptFailed
from trainer_kit.launch.config import count_gpus
from trainer_kit.tools.verify.cause import Cause, Evidence, find_cause
from trainer_kit.tools.verify.compare import Difference, Line, first_difference, read_lines, records_file
from trainer_kit.tools.verify.kill_plan import MOMENTS, Kill, choose_kill
from trainer_kit.tools.verify.recorder import RecordedStart
from trainer_kit.utils.units import format_duration

_START = "trainer_kit.tools.verify.child"
_TAIL_LINES = 20
_SECONDS_TO_END = 30


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a verification.

    Attributes:
        steps: Number of steps to compare.
        total_steps: Number of steps of the whole training.
        kill: Point at which the second start was killed; None if it differed before that.
        resumed_from: Step of the checkpoint that the third start resumed from; None if there was no third start.
        counts: Number of compared values of each part per step.
        difference: First difference; None if all bits are equal.
        amount: Size of the difference, in words; empty if unknown.
        cause: Likely cause; None if all bits are equal.
    """

    steps: int
    total_steps: int
    kill: Kill | None
    resumed_from: int | None
    counts: dict[str, int]
    difference: Difference | None = None
    amount: str = ""
    cause: Cause | None = None


@dataclasses.dataclass
class Records:
    """Records of the processes of one start.

    Attributes:
        header: Header that process 0 wrote.
        lines: Lines of each process, by step.
    """

    header: dict[str, Any]
    lines: list[dict[int, Line]]


class Verification:
    """Comparison of a script's starts.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        steps: Number of steps to compare, fewer if the training is shorter.
        seed: Chooses the step of the checkpoint, and the point of the kill.
        processes: Number of processes of each start; several are started as `trainer-kit launch` does.
        timeout: Time limit of one start, in seconds.
        say: Shows a sentence about each start.
    """

    def __init__(
        self, words: Sequence[str], steps: int, seed: int, processes: int, timeout: float, say: Callable[[str], None]
    ) -> None:
        self.words = [*words]
        self.seed = seed
        self.processes = processes
        self.timeout = timeout
        self.say = say
        self._steps = steps
        self._folder = Path()

    def run(self) -> Result:
        """Run the verification in a temporary folder.

        Returns:
            The result, with the first difference if there is one.

        Raises:
            ScriptFailed: If a start fails, takes too long, or never trains.
        """
        with tempfile.TemporaryDirectory(prefix="trainer_kit_verify_", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            self.say(f"three starts of at most {self._steps} steps each, seed {self.seed}")
            return self._compare()

    def _compare(self) -> Result:
        straight = self._straight()
        save_at, steps = straight.header["save_at"], max(straight.lines[0])
        kill = choose_kill(self.seed, save_at, steps, self.processes)
        begun = Result(steps, straight.header["total_steps"], None, None, _counts(straight))
        common = self._start("stopped", self._steps, save_at=save_at, against="straight")
        stopped = self._run(dataclasses.replace(common, kill=kill), "run that is killed")
        difference = _first(straight, stopped)
        if difference is None and not self._was_killed(common):
            difference = _other_end(straight, stopped)
        if difference is not None:
            return self._explained(begun, difference, straight, stopped, stopped)
        assert max(stopped.lines[0]) < kill.step, "it continued after SIGKILL"
        moment = MOMENTS[kill.moment] + (f", process {kill.rank}" if self.processes > 1 else "")
        self.say(f"killed in step {kill.step}, {moment}; the checkpoint is of step {save_at}")
        # A real restart draws other random numbers before its training than the previous start.
        again = dataclasses.replace(common, name="resumed", resume=True, chance=self.seed + 1)
        resumed = self._run(again, "resumed run")
        at = min(resumed.lines[0])
        result = dataclasses.replace(begun, kill=kill, resumed_from=at)
        if at == 0:
            raise ScriptFailed("the start after the kill found no checkpoint to resume from")
        difference = _first(straight, resumed, at) or _other_end(straight, resumed)
        return result if difference is None else self._explained(result, difference, straight, stopped, resumed)

    def _straight(self) -> Records:
        straight = self._run(self._start("straight", self._steps), "straight run")
        save_at, steps = straight.header["save_at"], max(straight.lines[0])
        if steps <= save_at:
            raise ScriptFailed(
                f"the training ends by itself at step {steps}, too early for a checkpoint at step {save_at} and a "
                "kill after it; let it train longer"
                + (f", or give --steps {steps}" if 2 <= steps < self._steps else "")
            )
        return straight

    def _explained(
        self, result: Result, difference: Difference, straight: Records, stopped: Records, differing: Records
    ) -> Result:
        """Add the cause of a difference, found with another straight run up to that step."""
        save_at, step = straight.header["save_at"], difference.step
        start = self._start("again", max(step, 1), save_at=save_at, against="straight", dump=(step, difference.place))
        again = self._run(start, "second straight run, to see whether it differs too")
        rank = difference.rank
        at = result.resumed_from
        evidence = Evidence(
            difference,
            straight=straight.lines[rank],
            again=again.lines[rank],
            stopped=stopped.lines[rank],
            found=differing.lines[rank],
            restored_at=at,
            is_reproducible=at is not None and _first(straight, again) is None,
        )
        amount = self._amount(difference, "again", "stopped" if at is None else "resumed")
        return dataclasses.replace(result, difference=difference, amount=amount, cause=find_cause(evidence))

    def _start(self, name: str, steps: int, **wanted: Any) -> RecordedStart:
        return RecordedStart(name, str(self._folder), f"run-{name}", steps, self.seed, chance=self.seed, **wanted)

    def _run(self, start: RecordedStart, title: str) -> Records:
        """Run one start to its end, and return its records."""
        if start.resume:
            start = dataclasses.replace(start, output_dir="run-stopped")
        begin = time.monotonic()
        log = self._folder / f"{start.name}.log"
        try:
            code = self._execute(start, log)
        except subprocess.TimeoutExpired:
            raise ScriptFailed(f"the {title} took longer than {format_duration(self.timeout)}{_tail(log)}") from None
        if code and not self._was_killed(start):
            raise ScriptFailed(f"the {title} failed with exit code {code}{_tail(log)}")
        records = self._read(start)
        if not all(records.lines):
            raise ScriptFailed(f"the script ended without a training by Trainer.train(){_tail(log)}")
        steps, seconds = max(records.lines[0]), time.monotonic() - begin
        self.say(f"{title}: to step {steps} of {records.header['total_steps']} in {format_duration(seconds)}")
        return records

    def _execute(self, start: RecordedStart, log: Path) -> int:
        """Run one start in its own processes, and return the exit code."""
        with open(log, "wb") as output:
            process = subprocess.Popen(
                self._command(start), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                return process.wait(self.timeout)
            finally:
                _end(process)

    def _command(self, start: RecordedStart) -> list[str]:
        words = [_START, start.dumps(), *self.words]
        if self.processes == 1:
            return [sys.executable, "-m", *words]
        options = ["--num-processes", str(self.processes), "--num-nodes", "1", "--node-rank", "0"]
        options += ["--max-restarts", "0", "--prefix", "--log-dir", str(self._folder / f"{start.name}-output")]
        options += ["--cpu"] if count_gpus() < self.processes else []
        return [sys.executable, "-m", "trainer_kit", "launch", *options, "-m", *words]

    def _was_killed(self, start: RecordedStart) -> bool:
        return (self._folder / f"{start.name}.killed").exists()

    def _read(self, start: RecordedStart) -> Records:
        read = [read_lines(records_file(self._folder, start.name, rank)) for rank in range(self.processes)]
        return Records(read[0][0], [{line.step: line for line in lines} for _, lines in read])

    def _amount(self, difference: Difference, one: str, other: str) -> str:
        """Return the size of a tensor's difference, from the files of two starts."""
        found = []
        for name in (one, other):
            path = records_file(self._folder, name, difference.rank).with_suffix(".safetensors")
            values = load_file(path) if path.exists() else {}
            found.append(values.get(f"{difference.step} {difference.place}"))
        return "" if found[0] is None or found[1] is None else describe_difference(found[0], found[1])


def describe_difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """Describe the difference of two tensors in words; empty if there is none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} of shape {[*one.shape]} and {other.dtype} of shape {[*other.shape]}"
    differing = one.ne(other) & ~(one.isnan() & other.isnan())
    count = int(differing.sum())
    if not count:
        return ""
    where = f"in {count:,} of {one.numel():,} elements"
    if one.is_complex() or one.dtype == torch.bool:
        return where
    distance = (one.double() - other.double()).abs()[differing]
    return f"{where}, by at most {distance.max():.3g}"


def _first(straight: Records, other: Records, restored_at: int | None = None) -> Difference | None:
    """Return the first difference between two starts: that of the earliest step and the lowest rank."""

    def differences() -> Iterator[Difference]:
        for rank, lines in enumerate(other.lines):
            for step, line in sorted(lines.items()):
                expected = straight.lines[rank].get(step)
                found = first_difference(expected, line, step == restored_at) if expected is not None else None
                if found is not None:
                    yield dataclasses.replace(found, rank=rank)
                    break

    return min(differences(), key=lambda difference: difference.step, default=None)


def _other_end(straight: Records, other: Records) -> Difference | None:
    """Return the difference between two starts that end at different steps; None if they end at the same one."""
    expected, found = max(straight.lines[0]), max(other.lines[0])
    if found == expected:
        return None
    return Difference(min(expected, found), "end", "", f"step {expected}", f"step {found}", others=0, is_restored=False)


def _counts(records: Records) -> dict[str, int]:
    last = records.lines[0][max(records.lines[0])]
    return {part: len(found) for part, found in last.parts.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "; the last that it wrote:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""

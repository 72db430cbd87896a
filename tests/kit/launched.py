"""What the tests of the launcher start: functions that a fresh process can import, and scripts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any


def rank() -> int:
    return int(os.environ["RANK"])


def place(*args: Any) -> tuple[Any, ...]:
    """What this process was told, and its arguments."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TRAINER_KIT_MIXED_PRECISION", "TRAINER_KIT_USE_CPU")
    return (*(os.environ[name] for name in names), *args)


def unpicklable() -> Any:
    return lambda: None


def end(how: str, folder: str) -> str:
    """Rank 1 ends in some way; the others wait, and fail as soon as it is gone if they are told to."""
    if rank() == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
        _end(how.removesuffix(" with rank 0"))
    elif how.endswith("with rank 0"):
        _wait_for_the_end_of_rank_1(Path(folder, "pid"))
        raise ConnectionError("rank 1 is gone")
    elif how == "is killed slowly":
        wait_for(Path(folder, "pid"))
        raise ConnectionError("rank 1 is gone")
    time.sleep(120 if how != "returns" else 0)
    return "done"


def _end(how: str) -> None:
    if how == "raises":
        raise ValueError("boom")
    if how == "raises and hangs":
        threading.Thread(target=time.sleep, args=(120,)).start()
        raise ValueError("boom")
    if how == "exits":
        print("not today", file=sys.stderr)
        sys.exit(3)
    if how == "is gone":
        os._exit(4)
    if how == "is killed slowly":  # its connections are closed, but the system still frees its memory
        time.sleep(0.25)
    if how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "is told to end":
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for(*files: Path) -> None:
    """Until there is something in all of them."""
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.stat().st_size for file in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.01)


def _wait_for_the_end_of_rank_1(file: Path) -> None:
    wait_for(file)
    stat = Path("/proc", file.read_text(), "stat")
    while stat.exists() and ") Z " not in stat.read_text():
        time.sleep(0.001)


def leave(folder: str, seconds: float = 0.2) -> None:
    """Leaves on a signal after a while, as a run does that saves first; writes down each signal that it gets."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        with open(Path(folder, f"signals-{rank()}"), "a") as file:
            file.write(f"{signal.Signals(number).name}\n")
        time.sleep(seconds)
        sys.exit(130 if number == signal.SIGINT else 143)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    Path(folder, f"ready-{rank()}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def leave_on_rank_1() -> None:
    if rank() == 1:
        sys.exit(143)


def try_again(folder: str, steps: list[int]) -> int:
    """Fails at each start but that of the last step; each start gets to a step and reports it (0: it does not)."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("start", number)
    if steps[number] and rank() == 0:
        Path(os.environ["TRAINER_KIT_PROGRESS_FILE"]).write_text(str(steps[number]))
        Path(folder, f"reported-{number}").write_text("yes")
    if number == len(steps) - 1:
        return number
    if steps[number]:
        wait_for(Path(folder, f"reported-{number}"))
    if rank() == 1:
        raise ValueError(f"failure {number}")
    time.sleep(120)
    return -1


def machine() -> None:
    """The only rank of its machine: rank 1 fails at each start, after a checkpoint at the first."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path(os.environ["TRAINER_KIT_PROGRESS_FILE"]).write_text("5")
    if rank() == 1:
        raise ValueError(f"failure {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    time.sleep(120)


def main() -> None:
    """`launched.py FUNCTION ARGUMENT…`: calls one of the functions above with strings."""
    name, *args = sys.argv[1:]
    globals()[name](*args)


if __name__ == "__main__":
    main()

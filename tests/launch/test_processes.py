"""Starting processes, watching them, and what a user is told of their ends."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import launched
from kit.launching import run

from trainer_kit.config import environment
from trainer_kit.errors import ProcessesLeft, ProcessFailed
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.processes import planned, run_processes, variables

RUNNER = ("-m", "trainer_kit.launch.script")
SCRIPT = launched.__file__


def test_a_command_gets_its_arguments_as_they_are(tmp_path: Path) -> None:
    words = ["$$a", "${local_rank}", "--", "-x", ""]
    code = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(repr(sys.argv[2:]))"
    assert run(sys.executable, "-c", code, f"{tmp_path}/", *words) == {0: None, 1: None}
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [repr(words)] * 2


@pytest.mark.distributed
def test_one_process_goes_the_same_way() -> None:
    assert run(launched.place, count=1) == {0: ("0", "0", "1", "no", "1")}


@pytest.mark.distributed
def test_everything_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "0")
    monkeypatch.delenv("OMP_NUM_THREADS")
    logger = logging.getLogger("torch.distributed.elastic")
    facts: list[Callable[[], Any]] = [
        lambda: dict(os.environ),
        lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        lambda: (logger.propagate, logger.handlers),
    ]
    before = [fact() for fact in facts]
    assert run(os.getenv, "OMP_NUM_THREADS") == dict.fromkeys(range(2), str(max(1, (os.cpu_count() or 1) // 2)))
    with pytest.raises(ProcessFailed):
        run(launched.unpicklable)
    assert [fact() for fact in facts] == before


@pytest.mark.distributed
def test_a_launcher_in_a_newcomer_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NEWCOMER, "1")
    assert run(os.getenv, environment.NEWCOMER) == {0: "", 1: ""}


# Failures


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "exit_code", "message"),
    [
        ("raises", 1, "failed with exit code 1:"),
        ("raises with rank 0", 1, "failed with exit code 1:"),
        ("raises and hangs", None, "failed and had to be ended:"),
        ("exits", 3, "left with exit code 3; the last that it wrote:\n  not today"),
        ("is gone", 4, "left with exit code 4"),
        ("is gone with rank 0", 4, "left with exit code 4"),
        ("is killed", -9, "was killed by SIGKILL (probably the memory of its host ran out)"),
        ("is killed with rank 0", -9, "was killed by SIGKILL (probably the memory of its host ran out)"),
        ("is killed slowly", -9, "was killed by SIGKILL"),
        ("crashes", -11, "was killed by SIGSEGV"),
        ("is told to end", -15, "was killed by SIGTERM"),
    ],
)
def test_the_first_failure_ends_the_run(how: str, exit_code: int | None, message: str, tmp_path: Path) -> None:
    said: list[str] = []
    # In a forked process threads are not waited for.
    start = [sys.executable, *RUNNER, SCRIPT, "end"] if how == "raises and hangs" else [launched.end]
    with pytest.raises(ProcessFailed) as caught:
        run(*start, how, str(tmp_path), say=said.append)
    ended, error = time.time(), caught.value
    assert (error.rank, error.exit_code) == (1, exit_code)
    assert message in str(error)
    if how.startswith("raises"):
        assert str(error).endswith(error.traceback.rstrip())
        assert error.traceback.endswith("\nValueError: boom\n")
        assert set(re.findall('File "(.*?)"', error.traceback)) == {SCRIPT}  # no file of ours or of torch's
    if how.endswith("with rank 0"):
        assert said[0] == "rank 0 failed after that: ConnectionError: rank 1 is gone"
    assert ended - (tmp_path / "pid").stat().st_mtime < 10


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "tpu", "explained"),
    [("SIGKILL", False, True), ("SIGSEGV", False, False), ("SIGKILL", True, True), ("SIGSEGV", True, True),
     ("SIGABRT", True, False)],
)  # fmt: skip
def test_a_process_killed_for_memory(number: str, tpu: bool, explained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.config.environment.has_torch_xla", lambda: True)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    config = LaunchConfig(tpu=tpu, cpu=not tpu, monitor_interval=0.05)
    with pytest.raises(ProcessFailed, match=f"was killed by {number}") as caught:
        run_processes(config, signal.raise_signal, [signal.Signals[number]], start_method="fork", remedy="buy some")
    assert ("; if the memory of its host ran out, buy some" in str(caught.value)) == explained


@pytest.mark.distributed
def test_a_rank_that_is_done_waits_for_the_others(tmp_path: Path) -> None:
    assert run(launched.end, "returns", str(tmp_path)) == {0: "done", 1: "done"}


@pytest.mark.distributed
def test_leaving_counts_though_others_have_returned() -> None:
    with pytest.raises(ProcessesLeft) as caught:
        run(launched.leave_on_rank_1, max_restarts=3)
    assert caught.value.exit_code == 143


@pytest.mark.distributed
def test_leaving_with_0_is_no_failure(tmp_path: Path) -> None:
    assert run(sys.exit, 0) == {0: None, 1: None}


@pytest.mark.distributed
def test_ranks_that_do_not_listen_are_killed(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not (pid := pathlib.Path(sys.argv[1])).exists():\n"
        "        time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "time.sleep(120)"
    )
    begin = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"rank 1 .* left with exit code 3"):
        run(sys.executable, "-c", code, str(tmp_path / "pid"))
    assert time.monotonic() - begin < 10
    assert not is_alive((tmp_path / "pid").read_text())


# Output


# Restarts


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        pytest.param(
            [10, 20, 30], [", from the checkpoint of step 10", ", from the checkpoint of step 20"],
            marks=pytest.mark.smoke,
        ),
        ([0, 20, 30], ["", ", from the checkpoint of step 20"]),
    ],
)  # fmt: skip
def test_a_run_is_restarted_from_its_checkpoint(steps: list[int], ends: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    assert run(launched.try_again, str(tmp_path), steps, max_restarts=3, say=said.append) == {0: 2, 1: 2}
    for number, end in enumerate(ends):
        # On a busy machine the launcher may end a rank that has failed before Python has come to its end.
        reason = rf"failed (with exit code 1|and had to be ended) \(ValueError: failure {number}\)"
        assert re.search(rf"{reason}; restart {number + 1} of 3{end}$", said[number]), said


def restarts_of(steps: list[int], allowed: int, folder: Path) -> tuple[int, list[str]]:
    """How often the ranks were restarted until the failure was final, and what was said after that."""
    said: list[str] = []
    with pytest.raises(ProcessFailed) as caught:
        run(launched.try_again, str(folder), steps, max_restarts=allowed, say=said.append)
    count = sum("; restart" in each for each in said)
    assert f"ValueError: failure {count}" in caught.value.traceback
    return count, [each for each in said if each.startswith("not restarted")]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("steps", "allowed", "restarts", "sentence"),
    [
        ([0] * 5, 3, 3, "not restarted: 3 restarts are made, and no checkpoint is written since the last"),
        ([10] * 5, 2, 2, "not restarted: 2 restarts are made, and no checkpoint is newer than that of step 10 since"),
        ([10, 10, 20, 20, 30], 1, 1, "not restarted: 1 restarts are made, and no checkpoint is newer"),
        ([0, 20, 30, 30, 30], 1, 3, "not restarted: 3 restarts are made, and no checkpoint is newer"),
        ([10, 20, 30], 0, 0, None),
    ],
)
def test_a_run_that_gets_nowhere_has_the_restarts_asked_for(
    steps: list[int], allowed: int, restarts: int, sentence: str | None, tmp_path: Path
) -> None:
    count, said = restarts_of(steps, allowed, tmp_path)
    assert count == restarts
    assert len(said) == (sentence is not None)
    assert all(each.startswith(sentence or "") for each in said)


@pytest.mark.distributed
def test_a_run_that_gets_on_has_more(tmp_path: Path) -> None:
    said: list[str] = []
    steps = [10, 20, 30, 40]
    assert run(launched.try_again, str(tmp_path), steps, max_restarts=1, say=said.append) == {0: 3, 1: 3}
    assert [each.partition("; ")[2] for each in said if "; restart" in each] == [
        "restart 1 of 1, from the checkpoint of step 10",
        "restart 2, more than max_restarts=1, since there is a newer checkpoint, from the checkpoint of step 20",
        "restart 3, more than max_restarts=1, since there is a newer checkpoint, from the checkpoint of step 30",
    ]


# Signals


@contextlib.contextmanager
def signalled(folder: Path, *numbers: int, pause: float = 0.3) -> Iterator[None]:
    """Sends signals to this process as soon as both ranks wait for them."""

    def send() -> None:
        launched.wait_for(folder / "ready-0", folder / "ready-1")
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "passed_on", "exit_code"),
    [
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGUSR1, "SIGUSR1", 143),
        (signal.SIGHUP, "SIGTERM", 143),
        (signal.SIGINT, "SIGINT", 130),
    ],
)
@pytest.mark.parametrize("kind", ["function", "command"])
def test_a_signal_is_passed_on_once(kind: str, number: int, passed_on: str, exit_code: int, tmp_path: Path) -> None:
    start = [launched.leave] if kind == "function" else [sys.executable, SCRIPT, "leave"]
    with signalled(tmp_path, number), pytest.raises(ProcessesLeft) as caught:
        run(*start, str(tmp_path), max_restarts=3)
    assert caught.value.exit_code == exit_code
    assert [(tmp_path / f"signals-{rank}").read_text() for rank in range(2)] == [f"{passed_on}\n"] * 2


@pytest.mark.distributed
def test_ranks_have_the_time_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.launch.rank_processes._END_SECONDS", 0.5)  # what they have after a failure
    begin = time.monotonic()
    with signalled(tmp_path, signal.SIGTERM), pytest.raises(ProcessesLeft):
        run(launched.leave, str(tmp_path), 3.0)
    assert time.monotonic() - begin > 3


@pytest.mark.distributed
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    with signalled(tmp_path, signal.SIGINT, signal.SIGINT), pytest.raises(ProcessesLeft) as caught:
        run(launched.leave, str(tmp_path), 60.0)
    assert caught.value.exit_code == 130
    assert time.monotonic() - begin < 10
    assert not any(is_alive(path.read_text()) for path in tmp_path.glob("ready-*"))


@pytest.mark.distributed
def test_ranks_that_know_no_signals_die_of_it(tmp_path: Path) -> None:
    code = "import os, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write('yes'); time.sleep(120)"
    with signalled(tmp_path, signal.SIGTERM), pytest.raises(ProcessesLeft) as caught:
        run(sys.executable, "-c", code, f"{tmp_path}/ready-")
    assert caught.value.exit_code == 143


@pytest.mark.distributed
def test_ranks_that_leave_by_themselves_are_not_started_anew(tmp_path: Path) -> None:
    def tell() -> None:
        paths = tmp_path / "ready-0", tmp_path / "ready-1"
        launched.wait_for(*paths)
        for path in paths:
            os.kill(int(path.read_text()), signal.SIGTERM)
            time.sleep(0.3)

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(ProcessesLeft) as caught:
        run(launched.leave, str(tmp_path), max_restarts=3)
    thread.join()
    assert caught.value.exit_code == 143


@pytest.mark.distributed
def test_a_failure_after_a_signal_is_a_failure(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "def on_signal(*_):\n"
        "    if os.environ['RANK'] == '1': raise OSError('disk full')\n"
        "    time.sleep(120)\n"
        "signal.signal(signal.SIGTERM, on_signal)\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write('yes')\n"
        "time.sleep(120)"
    )
    with signalled(tmp_path, signal.SIGTERM), pytest.raises(ProcessFailed, match=r"(?s)rank 1.*OSError: disk full"):
        run(sys.executable, "-c", code, f"{tmp_path}/ready-")


@pytest.mark.distributed
def test_nothing_goes_on_without_the_caller(tmp_path: Path) -> None:
    """The program's own handler of a signal raises while it waits for the ranks."""

    def on_alarm(*_: object) -> None:
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with signalled(tmp_path, signal.SIGALRM), pytest.raises(TimeoutError, match="enough"):
            run(launched.leave, str(tmp_path), 60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not any(is_alive(path.read_text()) for path in tmp_path.glob("ready-*"))


# Machines


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.launch.config.count_gpus", lambda: 2)
    with pytest.raises(ValueError, match=r"num_processes=3, but this machine has 2 GPUs; use at most 2, or cpu=True"):
        run_processes(LaunchConfig(num_processes=3), launched.place)


# What would be started


def test_planned_lists_each_rank() -> None:
    config = LaunchConfig(num_processes=4, num_nodes=2, node_rank=1, cpu=True, master_addr="host")
    first, second = planned(config, ["python", "train.py", "a b"])
    assert first.startswith("RANK=2 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=29500 ")
    assert second.startswith("RANK=3 LOCAL_RANK=1 ")
    assert first.endswith(" python train.py 'a b'")


def is_alive(pid: str) -> bool:
    """Whether a process with this number runs (one that has ended and nobody has asked after does not)."""
    try:
        return ") Z " not in Path("/proc", pid, "stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("device", "settings", "left_out"),
    [
        ({}, {"PJRT_DEVICE": "TPU", "TPU_VISIBLE_CHIPS": "0", "TPU_PROCESS_BOUNDS": "1,1,1"}, "CPU_NUM_DEVICES"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"},
         "TPU_VISIBLE_CHIPS"),
    ],
)  # fmt: skip
def test_the_variables_of_xla(
    device: dict[str, str], settings: dict[str, str], left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_kit.config.environment.has_torch_xla", lambda: True)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    for name, value in device.items():
        monkeypatch.setenv(name, value)
    one = variables(LaunchConfig(tpu=True, num_processes=1))
    assert one.items() >= {**settings, "TRAINER_KIT_USE_TPU": "1", "TRAINER_KIT_USE_CPU": "0"}.items()
    assert left_out not in one
    assert not {"TPU_VISIBLE_CHIPS", "CPU_NUM_DEVICES"} & variables(LaunchConfig(tpu=True)).keys()
    assert "PJRT_DEVICE" not in variables(LaunchConfig(cpu=True))


def test_threads_and_debug_mode_are_passed_on() -> None:
    settings = variables(LaunchConfig(cpu=True, num_cpu_threads_per_process=3, debug=True))
    assert (settings["OMP_NUM_THREADS"], settings["TRAINER_KIT_DEBUG"]) == ("3", "1")
    assert "TRAINER_KIT_DEBUG" not in variables(LaunchConfig(cpu=True))

"""How ranks have ended, and signals to them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.multiprocessing import SubprocessContext, start_processes

from trainer_kit.launch import rank_processes
from trainer_kit.launch.failures import write_failure
from trainer_kit.launch.output import OutputFiles
from trainer_kit.launch.rank_processes import RankProcesses, newest_step

SLEEPS = "import time; time.sleep(60)"
Start = Callable[..., RankProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    contexts: list[SubprocessContext] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}  # torch sets its own

    def started(*codes: str) -> RankProcesses:
        variables = {number: {"RANK": str(number), "TORCHELASTIC_RESTART_COUNT": "0"} for number in range(len(codes))}
        arguments = {number: ("-c", code) for number, code in enumerate(codes)}
        files = OutputFiles(tmp_path, tmp_path, None)
        context = start_processes("ranks", sys.executable, arguments, variables, files)
        assert isinstance(context, SubprocessContext)
        contexts.append(context)
        return RankProcesses(context)

    yield started
    for context in contexts:
        context.close()
        RankProcesses(context).close_output()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_ends_of_ranks(start: Start) -> None:
    ranks = start("", "raise SystemExit(3)", "raise SystemExit(143)", SLEEPS)
    while list(ranks.exit_codes().values()) != [0, 3, 143, None]:
        time.sleep(0.05)
    codes = ranks.exit_codes()
    assert [ranks.ending(*rank) for rank in codes.items()] == [0, 3, 143, None]
    assert [ranks.is_failed(*rank, None) for rank in codes.items()] == [False, True, False, False]
    workers = [Worker(number, 4 + number) for number in range(4)]
    assert [(each.rank, each.exit_code) for each in ranks.failures(workers, codes, None)] == [(5, 3)]


def test_a_signal_goes_to_those_that_run_and_is_no_failure(start: Start) -> None:
    ranks = start("", SLEEPS)
    while ranks.exit_codes()[0] is None:
        time.sleep(0.05)
    begin = time.monotonic()
    ranks.wait(0.3)
    assert time.monotonic() - begin >= 0.3
    ranks.send(signal.SIGTERM)
    ranks.wait(30)
    assert ranks.exit_codes() == {0: 0, 1: -signal.SIGTERM}
    assert ranks.ending(1, -signal.SIGTERM) == 143
    assert ranks.is_failed(1, -signal.SIGTERM, None)
    assert not ranks.is_failed(1, -signal.SIGTERM, signal.SIGTERM)
    assert ranks.is_failed(1, -signal.SIGKILL, signal.SIGTERM)


def test_ranks_that_do_not_listen_are_killed(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rank_processes, "_END_SECONDS", 0.3)
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(tmp_path / 'deaf')!r}, 'w')\n"
    ranks = start(deaf + SLEEPS)
    while not (tmp_path / "deaf").exists():
        time.sleep(0.05)
    ranks.close(signal.SIGTERM)
    assert ranks.exit_codes() == {0: -signal.SIGKILL}


def test_a_rank_that_hangs_after_its_error_has_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_processes, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(rank_processes, "_HANGING_SECONDS", 1.0)
    ranks, error_file = start(SLEEPS), tmp_path / "rank-0-0.error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    write_failure(ValueError("boom"), own_files=[])
    assert not ranks.is_failed(0, None, None), "it is just ending"
    ranks.settle()
    assert ranks.is_failed(0, None, None)
    (failure,) = ranks.failures([Worker(0, 7)], ranks.exit_codes(), None)
    assert (failure.rank, failure.error) == (7, "ValueError: boom")
    os.utime(error_file)
    assert not ranks.is_failed(0, None, None)


@pytest.mark.parametrize(("text", "step"), [("12", 12), ("", None), (None, None)])
def test_the_newest_checkpoint_is_known_once_it_is_reported(text: str | None, step: int | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "progress").write_text(text)
    assert newest_step(tmp_path / "progress") == step

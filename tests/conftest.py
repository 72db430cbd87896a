"""Settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from kit.fake_cuda import Gpus, fake_cuda

# Ignored where a shell started the tests in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests train tiny models: more threads only wait for one another, and with several processes for the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # torch asks DNS for each peer's name; a lost query would cost 5 s

os.environ.pop("COLUMNS", None)  # a terminal's width is no matter of the tests

# On a busy machine an example may take its time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, which would take a third of the time, and leave alone what is there then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A Trainer sets the level of trainer_kit's logger, which other tests read."""
    logger = logging.getLogger("trainer_kit")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def _preloaded() -> Iterator[Path]:
    if not hasattr(os, "pidfd_open"):  # it is Linux's
        yield Path(sys.executable)
        return
    from kit.interpreter import serve

    with serve() as python:
        yield python


@pytest.fixture
def preloaded_python(_preloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `sys.executable` a Python whose processes need not import torch; see `kit.interpreter`."""
    monkeypatch.setattr(sys, "executable", str(_preloaded))


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    """One simulated GPU; a race fails the test."""
    with fake_cuda() as gpus:
        yield gpus
    assert gpus.races == []


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> None:
    """A GPU: the real one of this machine, else a simulated one."""
    if not torch.cuda.is_available():
        request.getfixturevalue("gpus")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A single file runs in this process; several files run on the cores."""
    files = {name.partition("::")[0] for name in config.args}
    return 0 if len(files) == 1 and Path(*files).is_file() else min(os.cpu_count() or 1, 8)


TOO_LONG = 2.0  # seconds that a test of the default may take on a quiet machine
LONG_KINDS = {"slow", "distributed", "scenario", "xla", "browser", "ecosystem"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that take too long for the default."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and not LONG_KINDS & set(report.keywords):
                seconds[report.nodeid] += report.duration
    long = [f"{took:6.1f} s  {name}" for name, took in seconds.most_common() if took > TOO_LONG]
    if long:
        terminalreporter.section(f"{len(long)} took more than {TOO_LONG:g} s: make them quicker, or mark them slow")
        terminalreporter.write_line("\n".join(long[:20]))

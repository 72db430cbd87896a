"""Settings for all tests."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Ignored where a shell started the tests in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests train tiny models: more threads only wait for one another, and with several processes for the cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

os.environ.pop("COLUMNS", None)  # a terminal's width is no matter of the tests

# On a busy machine an example may take its time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A Trainer sets the level of trainer_kit's logger, which other tests read."""
    logger = logging.getLogger("trainer_kit")
    level = logger.level
    yield
    logger.setLevel(level)

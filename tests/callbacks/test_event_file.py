from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils.tensorboard.summary import scalar

from trainer_kit.callbacks.event_file import EventFile


def test_half_a_record_leaves_no_gap(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = EventFile(str(tmp_path))
    file.add(scalar("loss", 1.0), 1)
    (path,) = tmp_path.iterdir()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        with pytest.raises(OSError, match="No space left"):
            file.add(scalar("loss", 2.0), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    file.add(scalar("loss", 3.0), 3)
    file.close()
    assert [event.step for event in LegacyEventFileLoader(str(path)).Load()] == [0, 1, 3]

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard.summary import scalar

from trainer_kit.utils.event_file import EventFile, summary_writer


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


def test_torch_s_writer_writes_without_a_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    writer = summary_writer(str(tmp_path), purge_step=3, filename_suffix=".own")
    writer.add_scalar("loss", 0.5, 3)
    writer.add_scalars("pair/both", {"a": 1.0}, 3)
    assert threading.active_count() == threads
    (path,) = tmp_path.glob("*.own")
    (part,) = (tmp_path / "pair_both_a").glob("*.own")
    assert [event.step for event in LegacyEventFileLoader(str(part)).Load()] == [0, 3]
    writer.close()
    kinds = [event.WhichOneof("what") for event in LegacyEventFileLoader(str(path)).Load()]
    assert kinds == ["file_version", "session_log", "summary"]
    writer.add_scalar("loss", 0.25, 4)
    writer.close()
    assert len([*tmp_path.glob("*.own")]) == 2


def test_a_file_of_a_graph_alone_stays(tmp_path: Path) -> None:
    writer = summary_writer(str(tmp_path))
    writer.file_writer.add_event(Event(graph_def=b""))
    writer.close()
    (path,) = tmp_path.iterdir()
    assert [event.WhichOneof("what") for event in LegacyEventFileLoader(str(path)).Load()][1] == "graph_def"
    EventFile(str(tmp_path / "empty"), purge_step=1).close()
    assert not [*(tmp_path / "empty").iterdir()]

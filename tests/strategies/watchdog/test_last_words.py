"""What a process leaves behind when its watching thread ends it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer_kit.strategies.watchdog.last_words import leave_with


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_the_sentence_goes_to_the_error_stream_and_to_the_launcher(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    child = os.fork()
    if child == 0:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
        os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
        leave_with("rank 2 has not answered for 12 s")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert errors.read_text() == "rank 2 has not answered for 12 s\n"
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "LostProcessError: rank 2 has not answered for 12 s"
    extra = message["extraInfo"]
    assert int(extra["timestamp"]) == int(extra["time"]) < extra["time"], "what failed first in a second comes first"

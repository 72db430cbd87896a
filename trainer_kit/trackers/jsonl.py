"""`JsonLinesTracker`: records as lines of JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_kit._version import __version__
from trainer_kit.trackers.tracker import Tracker
from trainer_kit.utils.run_log import NAME, append_record
from trainer_kit.utils.write_errors import WriteErrors


class JsonLinesTracker(Tracker):
    """Append records to `log.jsonl`, which `trainer_kit.callbacks.read_log` reads.

    Args:
        project: Folder in `logging_dir`; None: `logging_dir` itself.
        logging_dir: Folder of the file.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, project: str | None = None, logging_dir: str | os.PathLike[str] = ".") -> None:
        super().__init__(project)
        self.tracker = Path(logging_dir) / (project or "") / NAME
        self._errors = WriteErrors("the tracker 'jsonl' could not write")

    def start(self) -> None:
        self.tracker.parent.mkdir(parents=True, exist_ok=True)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        append_record(self.tracker, "config", 0, {"trainer_kit": __version__, "arguments": values})

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one record; a step of None is written as 0."""
        with self._errors.warned():
            append_record(self.tracker, "log", step or 0, values)

"""`NeptuneTracker`: neptune.ai."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, numbers_and_texts


class NeptuneTracker(PackageTracker):
    """Store records at neptune.ai.

    Args:
        project: Project, such as "workspace/name"; None: that of `NEPTUNE_PROJECT`.
        run: A `neptune.Run` to use, which the program ends; None: a new one.
        **options: Arguments of `neptune.init_run`, such as `mode="offline"`.
    """

    name = "neptune"
    package = "neptune"

    def __init__(self, project: str | None = None, run: Any = None, **options: Any) -> None:
        super().__init__(project, **options)
        self._given = run
        self._new_id = ""

    def find_run(self) -> Any:
        return self._given

    def begin_run(self) -> Any:
        self._new_id = self.run_id or uuid.uuid4().hex  # unlike Neptune's own, it is known without a server
        options = {"project": self.project, "name": self.run_name, "custom_run_id": self._new_id}
        return self.client.init_run(**options | self.options)

    def read_id(self) -> str | None:
        return self._new_id or None

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker["parameters"] = self.client.utils.stringify_unsupported(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers, texts = numbers_and_texts(values)
        for name, value in numbers.items():
            if math.isfinite(value):
                self.tracker[name].append(value, step=step, **kwargs)
            else:  # which Neptune leaves out
                texts[f"not_finite/{name}"] = str(value)
        for name, text in texts.items():
            self.tracker[name].append(text, step=step, **kwargs)

    def upload(self, path: Path, name: str, kind: str) -> None:
        if path.is_dir():
            self.tracker[name].upload_files(str(path))
        else:
            self.tracker[name].upload(str(path))

    def end_run(self) -> None:
        if self.status == "failed":
            self.tracker["sys/failed"] = True
        self.tracker.stop()

"""`TrackioTracker`: Trackio."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker


class TrackioTracker(PackageTracker):
    """Store records with Trackio, on this machine or in a Space.

    Args:
        project: Project; None: "trainer_kit".
        **options: Arguments of `trackio.init`, such as `space_id`.
    """

    name = "trackio"
    package = "trackio"

    def find_run(self) -> Any:
        return self.client.context_vars.current_run.get()

    def begin_run(self) -> Any:
        options: dict[str, Any] = {"project": self.project or "trainer_kit", "name": self.run_name}
        if self.run_id is not None:
            options |= {"name": self.run_id, "resume": "must"}
        return self.client.init(**options | self.options)

    def read_id(self) -> str | None:
        return str(self.tracker.name)  # what Trackio resumes by

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.config.update(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log(dict(values), step=step, **kwargs)

    def upload(self, path: Path, name: str, kind: str) -> None:
        allowed = re.sub(r"[^A-Za-z0-9._-]", "-", f"{name}-{self.run_id}")  # trackio refuses other characters
        self.client.log_artifact(str(path), name=allowed, type=kind)

    def end_run(self) -> None:
        self.tracker.finish()

"""`SwanLabTracker`: SwanLab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, flat, numbers_and_texts


class SwanLabTracker(PackageTracker):
    """Store records with SwanLab.

    Args:
        project: Project; None: SwanLab's default.
        **options: Arguments of `swanlab.init`, such as `mode="local"`.
    """

    name = "swanlab"
    package = "swanlab"

    def find_run(self) -> Any:
        return self.client.get_run() if self.client.has_run() else None

    def begin_run(self) -> Any:
        options = {"project": self.project, "name": self.run_name}
        if self.run_id is not None:
            options |= {"id": self.run_id, "resume": "allow"}
        return self.client.init(**options | self.options)

    def read_id(self) -> str | None:
        return str(self.tracker.id)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.client.config.update(dict(flat(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers, texts = numbers_and_texts(values)
        shown = {name: self.client.Text(text) for name, text in texts.items()}
        self.tracker.log({**numbers, **shown}, step=step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images, as arrays or of PIL, by name."""
        images = {name: [self.client.Image(image) for image in each] for name, each in values.items()}
        self.tracker.log(images, step=step, **kwargs)

    def end_run(self) -> None:
        if self.status == "finished":
            self.tracker.finish()
        else:
            self.tracker.finish(
                "crashed" if self.status == "failed" else "aborted", error=f"the training {self.status}"
            )

"""`DVCLiveTracker`: DVCLive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, numbers_and_texts


class DVCLiveTracker(PackageTracker):
    """Store records with DVCLive, as files of the repository.

    Args:
        project: Without effect: DVC's projects are repositories.
        live: A `dvclive.Live` to use, which the program ends; None: a new one.
        **options: Arguments of `dvclive.Live`, such as `dir`.
    """

    name = "dvclive"
    package = "dvclive"

    def __init__(self, project: str | None = None, live: Any = None, **options: Any) -> None:
        super().__init__(project, **options)
        self._given = live

    def find_run(self) -> Any:
        return self._given

    def begin_run(self) -> Any:
        options = {"exp_name": self.run_name, "resume": self.run_id is not None}
        return self.client.Live(**options | self.options)

    def read_id(self) -> str | None:
        return str(self.tracker.dir)  # what a resume continues

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.log_params(_without_none(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step is not None:
            self.tracker.step = step
        numbers, texts = numbers_and_texts(values)
        for name, value in numbers.items():
            self.tracker.log_metric(name, value, **kwargs)
        for name, text in texts.items():
            self.tracker.log_metric(name, text, plot=False)
        self.tracker.make_summary()
        if step is None:
            self.tracker.next_step()

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None) -> None:
        """Store lists of images, as arrays or of PIL, by name."""
        if step is not None:
            self.tracker.step = step
        for name, images in values.items():
            for number, image in enumerate(images):
                self.tracker.log_image(f"{name}-{number}.png", image)

    def upload(self, path: Path, name: str, kind: str) -> None:
        self.tracker.log_artifact(str(path), type=kind, name=name)

    def end_run(self) -> None:
        self.tracker.end()


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out None, which DVC's parameters do not have."""
    kept = {name: value for name, value in values.items() if value is not None}
    return {name: _without_none(each) if isinstance(each, Mapping) else each for name, each in kept.items()}

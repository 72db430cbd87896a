"""`CometMLTracker`: Comet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, flat, numbers_and_texts


class CometMLTracker(PackageTracker):
    """Store records at Comet.

    Args:
        project: Project; None: that of `COMET_PROJECT_NAME`, else Comet's default.
        **options: Arguments of `comet_ml.start`, such as `online=False`.
    """

    name = "comet_ml"
    package = "comet_ml"

    def find_run(self) -> Any:
        experiment = self.client.get_running_experiment()  # the latest one, which may have ended
        return None if experiment is None or experiment.ended else experiment

    def begin_run(self) -> Any:
        options: dict[str, Any] = {"project_name": self.project}
        if self.run_id is not None:
            options |= {"experiment_key": self.run_id, "mode": "get"}
        if self.run_name is not None:
            options["experiment_config"] = self.client.ExperimentConfig(name=self.run_name)
        return self.client.start(**options | self.options)

    def read_id(self) -> str | None:
        return str(self.tracker.get_key())

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.log_parameters(dict(flat(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers, texts = numbers_and_texts(values)
        self.tracker.log_metrics(numbers, step=step, **kwargs)
        self.tracker.log_others(texts)

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images, as arrays or of PIL, by name."""
        for name, images in values.items():
            for image in images:
                self.tracker.log_image(image, name=name, step=step, **kwargs)

    def upload(self, path: Path, name: str, kind: str) -> None:
        if kind == "model":
            self.tracker.log_model(name, str(path), overwrite=True)
        else:
            self.tracker.log_asset(str(path), file_name=path.name, overwrite=True)

    def end_run(self) -> None:
        self.tracker.log_other("status", self.status)
        self.tracker.end()

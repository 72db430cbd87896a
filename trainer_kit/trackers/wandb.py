"""`WandBTracker`: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker

STEP = "train/global_step"
"""Name of the step, the x-axis of all numbers; W&B's own step counts records, and refuses to go back on a resume."""


class WandBTracker(PackageTracker):
    """Store records at Weights & Biases.

    Args:
        project: Project; None: that of `WANDB_PROJECT`, else W&B's default.
        **options: Arguments of `wandb.init`, such as `mode="offline"`.
    """

    name = "wandb"
    package = "wandb"

    def find_run(self) -> Any:
        return self.client.run

    def begin_run(self) -> Any:
        options = {"project": self.project, "name": self.run_name, "id": self.run_id, "resume": "allow"}
        run = self.client.init(**{name: value for name, value in options.items() if value is not None} | self.options)
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    def read_id(self) -> str | None:
        return str(self.tracker.id)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log({**values} if step is None else {**values, STEP: step}, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images, as arrays or of PIL, by name."""
        images = {name: [self.client.Image(image) for image in each] for name, each in values.items()}
        self.log(images, step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a table, given by columns and rows or as a data frame of pandas."""
        table = self.client.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **kwargs)

    def upload(self, path: Path, name: str, kind: str) -> None:
        artifact = self.client.Artifact(f"{name}-{self.tracker.id}", type=kind)  # names are the project's
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self.tracker.log_artifact(artifact)

    def end_run(self) -> None:
        if self.status == "interrupted":
            self.tracker.mark_preempting()
        self.tracker.finish(exit_code=0 if self.status == "finished" else 1)

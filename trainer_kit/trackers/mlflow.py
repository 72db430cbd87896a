"""`MLflowTracker`: MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, flat, numbers_and_texts

_MOST_PARAMETERS = 100  # of one request
_LONGEST_VALUE = 6000
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflowTracker(PackageTracker):
    """Store records at MLflow: in the store that `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri` names.

    The run is MLflow's active run meanwhile, so that the program can add to it.

    Args:
        project: Name of the experiment, created if missing; None: the active one, or that of the environment.
        logging_dir: Folder or URI of the files of a new experiment; None: as the store has it.
        **options: Arguments of `mlflow.start_run`, such as `tags` and `description`.
    """

    name = "mlflow"
    package = "mlflow"
    project_of_accelerate = "experiment_name"

    def __init__(
        self, project: str | None = None, logging_dir: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        if "nested_run" in options:  # accelerate's name
            options["nested"] = options.pop("nested_run")
        super().__init__(project, **options)
        self.logging_dir = logging_dir

    def find_run(self) -> Any:
        return self.client.active_run()

    def begin_run(self) -> Any:
        options: dict[str, Any] = {"run_name": self.run_name, "run_id": self.run_id} | self.options
        if options["run_id"] is None:
            options["experiment_id"] = self._experiment()
        return self.client.start_run(**options)

    def _experiment(self) -> str | None:
        if self.project is None:
            return None
        found = self.client.get_experiment_by_name(self.project)
        if found is not None:
            return str(found.experiment_id)
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(self.client.create_experiment(self.project, artifact_location=place))

    def read_id(self) -> str | None:
        return str(self.tracker.info.run_id)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store settings as parameters. MLflow keeps a parameter's first value; a changed one becomes a tag."""
        there = self.client.get_run(self.run_id).data.params
        given = {_allowed(name): str(value)[:_LONGEST_VALUE] for name, value in flat(values)}
        added = [(name, value) for name, value in given.items() if name not in there]
        for first in range(0, len(added), _MOST_PARAMETERS):
            self.client.log_params(dict(added[first : first + _MOST_PARAMETERS]), run_id=self.run_id)
        changed = {name: value for name, value in given.items() if there.get(name, value) != value}
        if changed:
            self._set_tags(changed)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers, texts = numbers_and_texts(values)
        metrics = {_allowed(name): value for name, value in numbers.items()}
        self.client.log_metrics(metrics, step=step, run_id=self.run_id, **kwargs)
        if texts:
            self._set_tags({_allowed(name): value for name, value in texts.items()})

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly as a file."""
        self.client.log_figure(figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file in a folder of the run's files."""
        self.client.log_artifact(local_path, artifact_path, run_id=self.run_id)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files of a folder in a folder of the run's files."""
        self.client.log_artifacts(local_dir, artifact_path, run_id=self.run_id)

    def upload(self, path: Path, name: str, kind: str) -> None:
        store = self.log_artifacts if path.is_dir() else self.log_artifact
        store(str(path), name)

    def end_run(self) -> None:
        self.client.end_run(_STATUS[self.status])

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        client = self.client.MlflowClient()
        for name, value in tags.items():
            client.set_tag(self.run_id, name, value)


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not take in names."""
    return re.sub(r"[^\w/.: -]", "_", name)

"""`AimTracker`: Aim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, numbers_and_texts

_CONTEXTS = {"train": "train", "eval": "val", "test": "test"}


class AimTracker(PackageTracker):
    """Store records with Aim, in a repository on this machine or at a server.

    Args:
        project: Aim's experiment; None: its default.
        run: An `aim.Run` to use, which the program closes; None: a new one.
        artifacts_uri: Where `report_artifacts` go, such as "s3://bucket/runs"; None: the folder `.aim/artifacts` of a
            repository on this machine.
        **options: Arguments of `aim.Run`, such as `repo`. Terminal logs and the use of the machine are stored only
            if they ask for it.
    """

    name = "aim"
    package = "aim"

    def __init__(
        self, project: str | None = None, run: Any = None, artifacts_uri: str | None = None, **options: Any
    ) -> None:
        super().__init__(project, **options)
        self._given = run
        self._artifacts_uri = artifacts_uri

    def find_run(self) -> Any:
        return self._given

    def begin_run(self) -> Any:
        options: dict[str, Any] = {"capture_terminal_logs": False, "system_tracking_interval": None}
        if self.run_id is not None:
            options |= {"run_hash": self.run_id, "force_resume": True}  # a killed process leaves its lock
        else:
            options["experiment"] = self.project
        run = self.client.Run(**options | self.options)
        if self.run_name is not None and self.run_id is None:
            run.name = self.run_name
        return run

    def read_id(self) -> str | None:
        return str(self.tracker.hash)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker["hparams"] = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers, texts = numbers_and_texts(values)
        for name, value in numbers.items():
            self._track(value, name, step, kwargs)
        for name, text in texts.items():
            self._track(self.client.Text(text), name, step, kwargs)

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images, as arrays or of PIL, by name."""
        for name, images in values.items():
            self._track([self.client.Image(image) for image in images], name, step, kwargs)

    def _track(self, value: Any, name: str, step: int | None, options: Mapping[str, Any]) -> None:
        """Store a value: `eval/loss` and `eval_loss` as "loss" in Aim's context of validation."""
        context = {"subset": "train"}
        for prefix, subset in _CONTEXTS.items():
            if name.startswith((f"{prefix}/", f"{prefix}_")):
                name, context = name[len(prefix) + 1 :], {"subset": subset}
        self.tracker.track(value, **{"name": name, "step": step, "context": context} | dict(options))

    def upload(self, path: Path, name: str, kind: str) -> None:
        if self.tracker.artifacts_uri is None:
            folder = Path(self.tracker.repo.path) / "artifacts"
            self.tracker.set_artifacts_uri(self._artifacts_uri or folder.absolute().as_uri())
        store = self.tracker.log_artifacts if path.is_dir() else self.tracker.log_artifact
        store(str(path), name=name, block=True)

    def end_run(self) -> None:
        if self.status == "finished":
            self.tracker.report_successful_finish()
        else:
            self.tracker.add_tag(self.status)
        self.tracker.close()

"""`ClearMLTracker`: ClearML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.trackers.tracker import PackageTracker, numbers_and_texts

_GROUPS = ("train", "eval", "test")


class ClearMLTracker(PackageTracker):
    """Store records at ClearML.

    Args:
        project: Project; None: "trainer_kit".
        **options: Arguments of `clearml.Task.init`. `auto_connect_frameworks` is False unless given: ClearML would
            store each file that torch saves, and TensorBoard's numbers a second time.
    """

    name = "clearml"
    package = "clearml"

    def find_run(self) -> Any:
        return self.client.Task.current_task()

    def begin_run(self) -> Any:
        options: dict[str, Any] = {
            "project_name": self.project or "trainer_kit",
            "task_name": self.run_name or "run",
            "auto_connect_frameworks": False,
            "reuse_last_task_id": False,
        }
        if self.run_id is not None:
            # An offset of 0: else a continued task adds its last step to each step.
            options |= {"reuse_last_task_id": self.run_id, "continue_last_task": 0}
        return self.client.Task.init(**options | self.options)

    def read_id(self) -> str | None:
        return str(self.tracker.id)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.connect(dict(values), name="trainer_kit")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers, texts = numbers_and_texts(values)
        logger = self.tracker.get_logger()
        for name, value in numbers.items():
            if not math.isfinite(value):  # ClearML would store zero
                texts[f"{name} of step {step}"] = str(value)
            elif step is None:
                logger.report_single_value(name, value, **kwargs)
            else:
                title, series = _title_and_series(name)
                logger.report_scalar(title, series, value, step, **kwargs)
        for name, text in texts.items():
            logger.report_text(f"{name}: {text}", print_console=False)

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Store lists of images, as arrays or of PIL, by name."""
        for name, images in values.items():
            title, series = _title_and_series(name)
            for number, image in enumerate(images):
                self.tracker.get_logger().report_image(title, f"{series}-{number}", step, image=image, **kwargs)

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
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        title, series = _title_and_series(table_name)
        self.tracker.get_logger().report_table(title, series, step, table_plot=table, **kwargs)

    def upload(self, path: Path, name: str, kind: str) -> None:
        self.tracker.upload_artifact(name, str(path), wait_on_upload=True)

    def end_run(self) -> None:
        if self.status == "failed":
            self.tracker.mark_failed(ignore_errors=True, status_reason="the training failed")
        elif self.status == "interrupted":
            self.tracker.mark_stopped(force=True)
        self.tracker.close()


def _title_and_series(name: str) -> tuple[str, str]:
    """Return the plot and the line of a number: `eval/loss` and `eval_loss` are the line "eval" of "loss"."""
    for group in _GROUPS:
        if name.startswith((f"{group}/", f"{group}_")):
            return name[len(group) + 1 :], group
    return name, "train"

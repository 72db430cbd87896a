"""`TensorBoardTracker`: event files for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.strategies.scalars import as_scalar
from trainer_kit.trackers.tracker import Tracker
from trainer_kit.utils.event_file import summary_writer
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.write_errors import WriteErrors


class TensorBoardTracker(Tracker):
    """Write numbers as scalars into TensorBoard event files.

    Args:
        project: Folder in `logging_dir`; None: `logging_dir` itself.
        logging_dir: Folder of the files.
        **options: Arguments of torch's `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    package = "tensorboard"

    def __init__(self, project: str | None = None, logging_dir: str | os.PathLike[str] = ".", **options: Any) -> None:
        super().__init__(project, **options)
        self.logging_dir = Path(logging_dir)
        self._left_out: set[str] = set()  # names of values that were no numbers
        self._errors = WriteErrors("the tracker 'tensorboard' could not write", self._reopen)

    def start(self) -> None:
        self.tracker = summary_writer(str(self.logging_dir / (self.project or "")), **self.options)

    @property
    def writer(self) -> Any:
        """The `SummaryWriter`, by the name that accelerate gives it too."""
        return self.tracker

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(values, indent=2, default=str)
        self.tracker.add_text("config", f"```json\n{text}\n```", 0)
        self.tracker.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one record; a value that is no number, text or mapping of numbers is left out with a warning.

        Args:
            values: Numbers, texts or mappings of numbers, by name.
            step: Step of the record; None if it has none.
            kwargs: Further arguments of the writer's methods.
        """
        with self._errors.warned():
            for name, value in values.items():
                if isinstance(value, str):
                    self.tracker.add_text(name, value, step, **kwargs)
                elif isinstance(value, Mapping):
                    self.tracker.add_scalars(name, value, step, **kwargs)
                elif (number := self._number(name, value)) is not None:
                    self.tracker.add_scalar(name, number, step, **kwargs)
            self.tracker.flush()

    def _number(self, name: str, value: Any) -> Any:
        """Return a value as a number; None if it is none, of which the first one of its name is warned."""
        try:
            return as_scalar(name, value)
        except TypeError as error:
            if name not in self._left_out:
                self._left_out.add(name)
                warn(f"the tracker 'tensorboard' leaves out what is no number: {error}")
            return None

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images by name, see `SummaryWriter.add_images`."""
        with self._errors.warned():
            for name, images in values.items():
                self.tracker.add_images(name, images, step, **kwargs)

    def finish(self) -> None:
        with self._errors.warned():
            self.tracker.close()

    def _reopen(self) -> None:
        """Let the next record begin another file."""
        try:
            self.tracker.close()
        finally:
            self.tracker.file_writer = None

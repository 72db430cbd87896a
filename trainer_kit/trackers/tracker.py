"""`Tracker`: the one interface of all experiment trackers, and of a user's own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal

Status = Literal["finished", "failed", "interrupted"]


class Tracker:
    """A run at an experiment tracker, for `TrainingArguments(report_to=...)` and `Accelerator(log_with=...)`.

    For a tracker of your own, override `log`, and what else it needs. A tracker written for accelerate works too.

    Only the main process calls a tracker. A Trainer sets `run_name` and `project` if they are None, and `run_id` if a
    checkpoint has it; it calls `start`, `store_init_configuration`, `log` with every record, `upload` with what
    `report_artifacts` names, and `finish`. An evaluation after training calls `start`, `log` and `finish` again.

    Args:
        project: Project of the run; None: the package's own default.
        **options: Options of the package for a new run.

    Attributes:
        name: Name of the tracker; "": that of its class.
        requires_logging_directory: Whether the constructor takes a folder as its second argument.
        project_of_accelerate: Name of the constructor's first argument in accelerate's class.
        package: Module that must be installed; None: no other than trainer_kit's own.
        project: Project of the run.
        run_name: Name of the run; None: the package chooses one.
        run_id: Identifies the run, set by `start`. If it is set before, `start` continues that run. Checkpoints keep
            it, so that a resumed training continues its run.
        tracker: The package's own object; set by `start`.
        status: How the run ended; set before `finish` is called.
    """

    name: ClassVar[str] = ""
    requires_logging_directory: ClassVar[bool] = False
    main_process_only: ClassVar[bool] = True
    package: ClassVar[str | None] = None

    project_of_accelerate: ClassVar[str] = "run_name"

    project: str | None = None
    run_name: str | None = None
    run_id: str | None = None
    tracker: Any = None
    status: Status = "finished"

    def __init__(self, project: str | None = None, **options: Any) -> None:
        if self.project_of_accelerate in options:
            name = self.project_of_accelerate
            raise TypeError(f"{type(self).__name__}({name}=) is accelerate's name of the project; give project=")
        self.project = project
        self.options = options

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether the tracker's package is installed."""
        if cls.package is None:
            return True
        spec = importlib.util.find_spec(cls.package)
        return spec is not None and spec.origin is not None  # a folder "wandb" of W&B's files is no package

    @classmethod
    def check_installed(cls) -> None:
        """Raise an ImportError if the tracker's package is not installed."""
        if not cls.is_installed():
            command = f"pip install {str(cls.package).replace('_', '-')}"
            raise ImportError(f"the tracker {cls.name!r} needs a package that is not installed; run `{command}`")

    def start(self) -> None:
        """Begin a run, or continue that of `run_id`."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the settings of the run.

        Args:
            values: Settings by name: strings, numbers, booleans, None, and lists and dicts of these.
        """

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store one record.

        Args:
            values: Numbers, texts or mappings of these, by name.
            step: Step of the record; None if it has none.
            kwargs: Options of the package for this record.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log(values, step); define it")

    def upload(self, path: Path, name: str, kind: str) -> None:
        """Store a file or folder with the run.

        Args:
            path: The file or folder.
            name: Its name, such as "best-checkpoint".
            kind: "model" or "report".
        """

    def finish(self) -> None:
        """End the run, and wait until everything is stored."""


class PackageTracker(Tracker):
    """A tracker of a Python package. A run that the program began itself is used, and left for it to end.

    Attributes:
        client: The imported module.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__(project, **options)
        self._owns_run = True
        self.client: Any = None

    def start(self) -> None:
        """Begin a run, or continue that of `run_id`.

        Raises:
            ImportError: If the package is not installed, or cannot be imported.
            RuntimeError: If the package cannot begin the run, such as without a login.
        """
        self.check_installed()
        try:
            self.client = importlib.import_module(str(self.package))
        except Exception as error:  # of the package's own code, or of a package that it needs
            raise ImportError(
                f"the tracker {self.name!r} needs the package {self.package!r}, whose import failed "
                f"({type(error).__name__}: {error}); install it again, or leave the tracker out"
            ) from error
        self.tracker = self.find_run()
        self._owns_run = self.tracker is None
        if self.tracker is None:
            try:
                self.tracker = self.begin_run()
            except Exception as error:
                verb = "begin a run" if self.run_id is None else f"continue the run {self.run_id}"
                raise RuntimeError(f"{self.name} cannot {verb}: {type(error).__name__}: {error}") from error
        self.run_id = self.read_id()

    def finish(self) -> None:
        """End the run, unless the program began it."""
        if self.tracker is not None and self._owns_run:
            self.end_run()
        self.tracker = None

    def find_run(self) -> Any:
        """Return the run that the program has begun; None if there is none."""
        return None

    def begin_run(self) -> Any:
        """Begin a run, or continue that of `run_id`, and return the package's object."""
        raise NotImplementedError

    def read_id(self) -> str | None:
        """Return the identifier of the run."""
        raise NotImplementedError

    def end_run(self) -> None:
        """End the run that `begin_run` returned."""
        raise NotImplementedError


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings with their names joined by slashes."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def numbers_and_texts(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Split a record into its numbers and its texts; mappings are flattened, other values become text."""
    entries = dict(flat(values))
    numbers = {name: float(value) for name, value in entries.items() if isinstance(value, Real)}
    return numbers, {name: str(value) for name, value in entries.items() if name not in numbers}

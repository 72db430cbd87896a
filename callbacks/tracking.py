"""`Tracking`: the records of a run at experiment trackers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.trackers.registry import make_tracker, tracker_name
from trainer_kit.trackers.tracker import Tracker
from trainer_kit.utils.write_errors import WriteErrors

from .scalar_tags import final_tags, scalar_tags

if TYPE_CHECKING:
    from trainer_kit.run import Run
    from trainer_kit.trackers.tracker import Status

_logger = logging.getLogger("trainer_kit")


class Tracking(Callback):
    """Store every number of the records, the arguments and the model's configuration at experiment trackers.

    Tags are those of TensorBoard: `train/loss`, `eval/loss`, `test/loss`. The step is the optimizer step. The main
    process begins the runs when training begins; if that fails, for example without a login, training does not begin.
    A record that cannot be stored is warned of once, and training continues. A checkpoint has the identifiers of the
    runs, and a resume continues them; steps that are taken again are stored again. When training ends, what
    `args.report_artifacts` names is uploaded and the runs are ended. An evaluation after that continues them shortly.

    Args:
        trackers: Names, see `trainer_kit.trackers.TRACKERS`, and trackers of your own.

    Raises:
        ValueError: If a name is unknown, or two trackers have one name.
        TypeError: If an object has no method `log`.
        ImportError: If the package of a tracker is not installed.
    """

    priority = 205  # after Report, which writes the page to upload

    def __init__(self, trackers: Sequence[Any]) -> None:
        self.trackers = [make_tracker(each, "report_to") for each in trackers]
        self._errors: dict[str, WriteErrors] = {}
        for name in map(tracker_name, self.trackers):
            if name in self._errors:
                raise ValueError(f"report_to holds two trackers named {name!r}; give one of them another `name`")
            self._errors[name] = WriteErrors(f"the tracker {name!r} could not store a record", errors=Exception)
        self._runs: dict[str, str] = {}  # identifiers of the runs, by tracker
        self._started: list[Any] = []
        self._is_training = self._has_trained = self._is_resumed = False
        self._status: Status = "finished"
        self._newest: Path | None = None

    def on_train_begin(self, run: Run) -> None:
        if self._has_trained and not self._is_resumed:
            self._runs = {}
        self._is_training = self._has_trained = True
        self._is_resumed, self._newest = False, None
        self._start(run)
        self._store_settings(run)

    def on_regroup(self, run: Run) -> None:
        self._start(run)  # the last main process may be lost

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._log(run, scalar_tags(record, "train"))

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._log(run, scalar_tags(metrics, "eval"))

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self._log(run, scalar_tags(metrics, "test"))

    def on_save(self, run: Run, directory: Path) -> None:
        self._newest = directory

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._status = "interrupted" if metrics is None else "finished"
        if metrics is not None:
            self._log(run, final_tags(metrics))

    def on_exit(self, run: Run) -> None:
        self._end_training(run, self._status)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._end_training(run, "failed")

    def state_dict(self) -> dict[str, Any]:
        return {"runs": dict(self._runs)} if self._runs else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._runs, self._is_resumed = dict(state_dict["runs"]), True

    def _start(self, run: Run) -> None:
        """Begin or continue all runs, unless they are. An error is raised on all processes, so that none waits."""

        def start() -> dict[str, str]:
            for tracker in self.trackers[len(self._started) :]:
                self._start_one(run, tracker)
            return self._runs

        started = run.strategy.collectives.on_main(start)  # any process may become the main one
        self._runs = dict(started or {})  # None before this process joins the others

    def _start_one(self, run: Run, tracker: Any) -> None:
        name = tracker_name(tracker)
        if isinstance(tracker, Tracker):
            tracker.project = tracker.project or run.args.project
            tracker.run_name = tracker.run_name or run.args.run_name or Path(run.args.output_dir).name
            tracker.run_id = self._runs.get(name)
        if hasattr(tracker, "start"):
            tracker.start()
        self._started.append(tracker)
        if isinstance(tracker, Tracker) and tracker.run_id is not None:
            self._runs[name] = tracker.run_id

    def _store_settings(self, run: Run) -> None:
        settings = run.args.to_dict()
        describe = getattr(getattr(run.model, "config", None), "to_dict", None)
        if callable(describe):
            settings["model"] = describe()
        self._call("store_init_configuration", settings)

    def _log(self, run: Run, tags: dict[str, float]) -> None:
        if self._is_training:
            self._call("log", tags, step=run.state.step)
            return
        is_new = not self._runs
        self._start(run)  # for an evaluation before or after training
        if is_new:
            self._store_settings(run)
        self._call("log", tags, step=run.state.step)
        self._finish("finished")

    def _end_training(self, run: Run, status: Status) -> None:
        if not self._is_training:
            return
        self._is_training = self._is_resumed = False
        if self._started:
            for name, path, kind in self._artifacts(run):
                if path is not None and path.exists():
                    self._call("upload", path, name, kind)
                else:
                    _logger.warning("report_artifacts has %r, but the run has written none", name)
        self._finish(status)

    def _finish(self, status: Status) -> None:
        for tracker in self._started:
            if isinstance(tracker, Tracker):
                tracker.status = status
        self._call("finish")
        self._started = []

    def _artifacts(self, run: Run) -> Iterator[tuple[str, Path | None, str]]:
        """Yield the name, the path and the kind of what `report_artifacts` names."""
        folder, chosen = Path(run.args.output_dir), run.args.report_artifacts
        if "report" in chosen:
            yield "report", folder / "report.html", "report"
        if "best" in chosen:
            yield "best-checkpoint", folder / f"checkpoint-{run.state.best_step}", "model"
        if "last" in chosen:
            yield "last-checkpoint", self._newest, "model"

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the started trackers that have it; an error is logged as a warning."""
        for tracker in self._started:
            if hasattr(tracker, method):
                with self._errors[tracker_name(tracker)].warned():
                    getattr(tracker, method)(*copy.deepcopy(arguments), **options)

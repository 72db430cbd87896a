"""`JsonLines`: the events of a run as lines of JSON, which `read_log` reads."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit._version import __version__
from trainer_kit.callback import Callback
from trainer_kit.errors import CutOffError, FolderInUseError
from trainer_kit.report.provenance import describe_data, hub_metadata
from trainer_kit.utils.run_lock import holder_of
from trainer_kit.utils.run_log import FORMAT, NAME, append_record, read_log
from trainer_kit.utils.write_errors import WriteErrors

if TYPE_CHECKING:
    from trainer_kit.run import Run
    from trainer_kit.state import TrainState

__all__ = ["JsonLines", "read_log"]

_logger = logging.getLogger("trainer_kit")
_MOST_WARNINGS = 1000
_LONGEST_WARNING = 2000


class JsonLines(Callback):
    """Append one JSON object per line to a file, which `read_log` reads.

    Each line has `event`, `time` (seconds since 1970), `step` and the event's own fields. The events are:

    - "log", "evaluate", "predict": a record or metrics. "save": the `directory` of a checkpoint.
    - "start": begins each start and restart. A reader must skip earlier lines of a greater step. Fields: the version
      of this `format` and of `trainer_kit`, the time when this start `began`, `total_steps`, the `environment`, the
      `arguments`, the number of `parameters` of the model and of `trainable` ones, what a `model_card` says of the
      model, and the size, name and split of the `data` as far as they are known.
    - "membership": other machines or processes train on. Fields: those of a membership.
    - "rollback": the run returned to a checkpoint. A reader must skip earlier lines of a greater step here too.
    - "warning": the `message` and `source` of a Python warning, or of a warning or error logged by trainer_kit. The
      first 1,000 of a start are written, and the first 2,000 characters of each.
    - "end": the `ending` ("finished", "stopped" by a callback, "signal" with its `exit_code`), the `reason` if it is
      known, and `best_step` and `best_metric` if the run has judged its model.
    - "exception": the `type` and `message` of the error that ended the run.

    NaN and infinity, which JSON lacks, are written as the strings "nan", "inf" and "-inf". Each line is written
    immediately and completely. If that fails (a full disk), one warning is logged and training continues.

    Args:
        path: The file; None: `log.jsonl` in `args.output_dir`.
    """

    priority = 100
    is_reporter = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._state: TrainState | None = None  # state of the training being logged
        self._errors = WriteErrors("")
        self._listener: _WarningListener | None = None

    def on_train_begin(self, run: Run) -> None:
        self._state = run.state
        parameters = list(run.model.parameters())
        self._write(
            run,
            "start",
            format=FORMAT,
            trainer_kit=__version__,
            began=run.ledger.started,
            total_steps=run.total_steps,
            environment=_environment(run),
            parameters=sum(each.numel() for each in parameters),
            trainable=sum(each.numel() for each in parameters if each.requires_grad),
            model_card=hub_metadata(run.model),
            data=describe_data(run.train_dataset, run.eval_dataset),
            arguments=run.args.to_dict(),
        )
        self._write_membership(run)
        self._stop_listening()
        if run.strategy.is_main:
            self._listener = _WarningListener(lambda source, message: self._warn(run, source, message))
            self._listener.attach()

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._write(run, "log", **record)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, "evaluate", **metrics)

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, "predict", **metrics)

    def on_save(self, run: Run, directory: Path) -> None:
        self._write(run, "save", step=int(directory.name.rpartition("-")[2]), directory=directory.name)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if metrics is not None:
            self._write(run, "log", **metrics)
        self._write(run, "end", **_ending(run), **_best(run))

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._write(run, "rollback")

    def on_regroup(self, run: Run) -> None:
        if run.strategy.is_main and self._listener is None:  # the last main process is lost
            self.on_train_begin(run)
        else:
            self._write_membership(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if run.state is self._state and not isinstance(error, (CutOffError, FolderInUseError)):  # others own it then
            self._write(run, "exception", type=type(error).__name__, message=str(error))
        self._stop_listening()

    def on_exit(self, run: Run) -> None:
        self._stop_listening()

    def _write_membership(self, run: Run) -> None:
        if (entry := run.ledger.memberships.latest) is not None:
            self._write(run, "membership", **entry.to_dict())

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.detach()
            self._listener = None

    def _warn(self, run: Run, source: str, message: str) -> None:
        self._write(run, "warning", source=source, message=message[:_LONGEST_WARNING])

    def _write(self, run: Run, event: str, /, step: int | None = None, **values: Any) -> None:
        if not run.strategy.is_main:
            return
        path = Path(self._path) if self._path is not None else Path(run.args.output_dir) / NAME
        if event in ("evaluate", "predict") and (other := holder_of(path.parent)) is not None:
            _logger.warning("%s is not written to: %s trains there", path, other)
            return
        self._errors.sentence = f"{path} could not be written to"
        with self._errors.warned():
            append_record(path, event, run.state.step if step is None else step, values)


class _WarningListener(logging.Handler):
    """Forward the warnings of Python and of trainer_kit's logger while attached.

    Args:
        take: Called with the source and the message of each.
    """

    def __init__(self, take: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take = take
        self._left = _MOST_WARNINGS
        self._show_before = warnings.showwarning

    def attach(self) -> None:
        self._show_before, warnings.showwarning = warnings.showwarning, self._show
        _logger.addHandler(self)

    def detach(self) -> None:
        self._left = 0
        _logger.removeHandler(self)
        if warnings.showwarning == self._show:  # else another hook still calls it
            warnings.showwarning = self._show_before

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._hand_on(record.name, record.getMessage())
        except Exception:  # as handlers of the standard library do
            self.handleError(record)

    def _show(self, message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        self._hand_on(category.__name__, str(message))
        self._show_before(message, category, *place, **more)

    def _hand_on(self, source: str, message: str) -> None:
        if self._left > 0:
            self._left -= 1
            self._take(source, message)


def _ending(run: Run) -> dict[str, Any]:
    """Return how a training ended, and why if it stopped before its last step."""
    reason = {} if run.requests.reason is None else {"reason": run.requests.reason}
    if run.requests.exit_code is not None:
        return {"ending": "signal", "exit_code": run.requests.exit_code, **reason}
    return {"ending": "finished"} if run.state.step >= run.total_steps else {"ending": "stopped", **reason}


def _best(run: Run) -> dict[str, Any]:
    """Return the step and the value by which the best model was judged, if it was."""
    state = run.state
    if run.args.metric_for_best_model is None or state.best_step is None:
        return {}
    return {"best_step": state.best_step, "best_metric": state.best_metric}


def _environment(run: Run) -> dict[str, Any]:
    """Return versions, host, process, device and precision of the run."""
    strategy = run.strategy
    packages = ("transformers", "peft", "datasets")  # where they are imported
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    versions = {"CUDA": torch.version.cuda, **loaded}
    return {
        "trainer_kit": __version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        **{name: version for name, version in versions.items() if version},
        "system": platform.platform(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": _device_name(strategy.device),
        "processes": strategy.world_size,
        "precision": run.args.mixed_precision if strategy.precision is None else strategy.precision.mode,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    facts = Path("/proc/cpuinfo")  # on Linux, platform.processor() is only the architecture
    lines = facts.read_text(encoding="utf-8", errors="replace").splitlines() if facts.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()

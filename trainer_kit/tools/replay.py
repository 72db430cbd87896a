"""`replay`: runs the failed step of a run again on the CPU, and finds its failure."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainer_kit
from trainer_kit.checkpoint import load_checkpoint_in_model, read_arguments, read_state, verify
from trainer_kit.checkpoint.format.inventory import CRASH_PREFIX
from trainer_kit.data.fetcher import Fetcher
from trainer_kit.data.sampling import BatchIndices
from trainer_kit.data.source import data_source
from trainer_kit.debugging.crash_dump import SPOILED
from trainer_kit.debugging.nonfinite import Diagnosis, NonFiniteOrigin, Work, cause, diagnose, kind_of
from trainer_kit.loss.loss import Loss
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.tools.script_runner import Train, run_until_training
from trainer_kit.trainer import Trainer
from trainer_kit.utils.units import format_count, join_names

_OWN = tuple(f"{Path(str(module.__file__)).parent}/" for module in (torch, trainer_kit))
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)\n\s+(.+)')


def replay(folder: Path, words: Sequence[str], say: Callable[[str], None], fail: Callable[[str], None]) -> NoReturn:
    """Run a user's script up to its training, and then the single step of a crash folder instead.

    The process ends with it: with code 0 if the run's error is reproduced, else 1.

    Args:
        folder: Folder `crash-STEP`.
        words: The script, or "-m" and a module, then its arguments: the same as in the run.
        say: Shows a line of the findings.
        fail: Shows why the step cannot be run: the folder belongs to another model, or holds no batch.

    Raises:
        ValueError: If the folder is damaged or no crash folder, or if the script does not train.
    """
    verify(folder)
    report = read_state(folder, "report")
    if not isinstance(report, dict) or "error" not in report:
        raise ValueError(f"{folder} is no folder that a broken-off run left (crash-STEP in its output_dir)")

    def take_over(trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> int:
        try:
            return 0 if _Replay(folder, report, trainer, say).run() else 1
        except BrokenPipeError:  # the reader has closed the pipe (`| head`)
            return 0
        except ValueError as error:
            fail(str(error))
            return 1

    run_until_training(words, take_over)


class _Replay:
    """Replay of one step, with the model and the loss of a script's Trainer."""

    def __init__(self, folder: Path, report: dict[str, Any], trainer: Trainer, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.report = report
        self.trainer = trainer
        self.say = say

    def run(self) -> bool:
        report, model = self.report, self.trainer.run.model
        epoch = report["epoch"]
        where = f"step {report['step']}" + ("" if epoch is None else f", epoch {epoch}")
        self.say(f"{where}: {report['error']['type']}: {self._message()}")
        if epoch is not None:  # the loss may depend on them
            state = self.trainer.run.state
            state.step, state.epoch, state.position = report["step"] - 1, epoch, report["position"]
        self.strategy = SingleDevice("cpu", Precision(report["precision"]))
        self.strategy.setup()
        self.strategy.prepare(model).train()
        self._load_weights(model)
        self.loss = Loss.by_arguments(model, model, self.trainer.compute_loss, self.trainer.args)
        self.loss.shifts = report["shifts_labels"]
        try:
            works = self._works()
        except ValueError:
            raise
        except Exception as error:  # from the user's dataset or collator
            return self._raised(error)
        self.say(
            f"run again on the CPU with precision {report['precision']!r} (the run: {report['device']}), "
            f"{format_count(len(works), 'micro-batch')}"
        )
        return self._judge(diagnose(self.loss, works, self.strategy), works)

    def _message(self) -> str:
        return str(self.report["error"]["message"])

    def _load_weights(self, model: torch.nn.Module) -> None:
        """Load the weights from before the step, else those of the newest checkpoint, else keep the script's."""
        report, folders = self.report, []
        if report["newest_checkpoint"] is not None:
            folders.append(self.folder.with_name(Path(report["newest_checkpoint"]).name))  # the run may have moved
        if report["weights_by_rank"] is not None and report["weights_are"] != SPOILED:
            own = report["weights_by_rank"] == report["rank"]
            folders.insert(0, self.folder if own else self.folder.with_name(f"{CRASH_PREFIX}{report['step']}"))
        source = next((each for each in folders if each.is_dir()), None)
        if source is not None:
            load_checkpoint_in_model(model, source)
        self.say(f"weights: {'as the script made them' if source is None else f'those of {source}'}")

    def _works(self) -> list[Work]:
        """Return the recorded micro-batches, or read incomplete ones again from the script's dataset."""
        kept = read_state(self.folder, "batch") or []
        if not kept:
            raise ValueError(f"{self.folder} holds no batch to run again: {'; '.join(self.report['missing'])}")
        if all(entry["whole"] for entry in kept):
            return [Work(entry["batch"], *_work_of(entry)) for entry in kept]
        if any(entry["sample_ids"] is None for entry in kept):
            raise ValueError(f"{self.folder} holds only a part of the batch: {'; '.join(self.report['missing'])}")
        self.say("batch: read again from the script's own dataset")
        source = data_source("train_dataset", self.trainer.run.train_dataset)
        collate = source.collate or self.trainer.collate
        fetcher = Fetcher(source.dataset, collate, read_arguments(self.folder)["seed"])
        return [Work(fetcher[self._slot(entry)][1], *_work_of(entry)) for entry in kept]

    def _slot(self, entry: dict[str, Any]) -> BatchIndices:
        start, epoch = entry["start"], self.report["epoch"]
        repeats = entry.get("repeats")  # earlier versions did not write it
        return BatchIndices(epoch, start, entry["sample_ids"], entry["counted"], 0, True, start, start, False, repeats)

    # Findings

    def _judge(self, found: Diagnosis, works: list[Work]) -> bool:
        self._show(found)
        if found.error is not None:
            return self._raised(found.error)
        if found.micro_batch is not None:
            self._show_operation(works[found.micro_batch])
        elif found.parameter is not None:
            self._show_backward(works)
        if self.report["error"]["type"] == "NonFiniteError" and not found.is_finite:
            self.say("reproduced: the step is not finite on the CPU either")
            return True
        self.say(f"not reproduced: {self._why_not()}")
        return False

    def _show(self, found: Diagnosis) -> None:
        for bad in found.columns:
            self.say(f"batch: {bad.column} of micro-batch {bad.micro_batch} holds {bad.kind} in rows {bad.rows}")
        for line in self.report["found"].get("inputs", []):
            self.say(f"in the run: {line}")
        if found.weights:
            self.say(f"weights that are not finite: {join_names(found.weights)}")
        if found.loss is not None:
            self.say(f"loss: {found.loss}, norm of the gradients: {found.norm}")
        if found.module is not None:
            self.say(f"first bad module: {found.module.place}: {found.module.kind} came up in it")
        if found.parameter is not None:
            self.say(f"first bad parameter on the way back: {found.parameter}")

    def _show_operation(self, work: Work) -> None:
        """Show the line of the user's code in which the loss became nonfinite."""
        with _Operations() as operations:
            again = diagnose(self.loss, [work], self.strategy)
        if again.loss is not None and (birth := cause(operations.births, again.loss)) is not None:
            self.say(f"first bad operation: {birth.place}: {birth.kind} came up in it")

    def _show_backward(self, works: list[Work]) -> None:
        """Show the result of torch's anomaly detection for a NaN gradient, and the line of its forward pass."""
        before = torch.is_anomaly_enabled()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autograd.set_detect_anomaly(True)
            try:
                error = diagnose(self.loss, works, self.strategy).error
            finally:
                torch.autograd.set_detect_anomaly(before)
        if error is None:
            return
        self.say(f"anomaly detection: {error}")
        for warning in caught:
            frames = [frame for frame in _FRAME.findall(str(warning.message)) if not frame[0].startswith(_OWN)]
            if frames:
                path, line, name, code = frames[-1]
                self.say(f"the gradient of: {path}:{line}, in {name}: {code}")

    def _raised(self, error: Exception) -> bool:
        for line in _frames_of_the_user(error).format():
            self.say(line.rstrip())
        same = bool(type(error).__name__ == self.report["error"]["type"])
        self.say("reproduced: the same kind of error" if same else f"not reproduced: {self._why_not()}")
        return same

    def _why_not(self) -> str:
        if self.report["error"]["type"] == "CallbackError":
            return f"the step itself runs through, and callbacks are not called here ({self._message()})"
        if self.report["weights_by_rank"] is None or self.report["weights_are"] == SPOILED:
            return "the weights are not those from before the step, which the run could not keep"
        if self.report["processes"] > 1:
            return (
                f"this was rank {self.report['rank']} of {self.report['processes']}, whose micro-batches may have been "
                f"fine: replay {CRASH_PREFIX}{self.report['step']}-rank-RANK of another one, if it is there"
            )
        return (
            f"the CPU now may compute otherwise than {self.report['device']} did then (kernels, precision, buffers "
            "that are not saved), or the script was given other arguments or has changed"
        )


def _work_of(entry: dict[str, Any]) -> tuple[int, int, bool]:
    """Return the fields of `Work` except the batch."""
    return entry["seed"], entry["samples"], entry["counted"]


class _Operations(TorchDispatchMode):
    """Mode that records, in order, the operations with nonfinite results from finite inputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.births: list[NonFiniteOrigin] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [args, kwargs or {}]
        before = kind_of(inputs) if func._schema.is_mutable else None  # it may overwrite its inputs
        result = func(*args, **(kwargs or {}))
        kind = kind_of(result if isinstance(result, (list, tuple)) else [result])
        if kind is None or "empty" in func.__name__:  # uninitialized memory
            return result
        given = before if func._schema.is_mutable else kind_of(inputs)
        if given != kind and given != "nan":
            self.births.append(NonFiniteOrigin(_line(str(func)), kind, from_inf=given == "inf"))
        return result


def _frames_of_the_user(error: BaseException) -> traceback.TracebackException:
    """Return an error's traceback, and those of its causes, without frames of torch and trainer_kit."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        kept = [frame for frame in each.stack if not frame.filename.startswith(_OWN)]
        each.stack = traceback.StackSummary.from_list(kept)
        each = each.__cause__ or each.__context__
    return shown


def _line(operation: str) -> str:
    """Return the innermost line on the stack outside torch and trainer_kit, with the operation that it calls."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OWN)]
    if not frames:
        return operation
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line} ({operation})"

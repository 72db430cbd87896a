"""Crash dumps: the folder `crash-STEP` of a run that ended with an error, input of `trainer-kit replay`.

Usage in the loop::

    dump = CrashDump(run, loss, loader)  # once these are created and a checkpoint is loaded
    dump.write(error, newest, micro, fetching)  # where an error ends training; never raises
"""

from __future__ import annotations

import logging
import platform
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.checkpoint import take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format.inventory import CRASH_PREFIX
from trainer_kit.checkpoint.format.model_values import split_values
from trainer_kit.checkpoint.format.safetensors_writer import refuse_unstorable
from trainer_kit.data.fetcher import Fetcher
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import MicroBatch, TrainLoader
from trainer_kit.data.sampling import BatchIndices, mix
from trainer_kit.debugging.nonfinite import Diagnosis, Work, diagnose
from trainer_kit.errors import CutOffError, DataError, FolderInUseError, NonFiniteError, SaveError, WorkerError
from trainer_kit.loss.loss import Loss
from trainer_kit.run import Run
from trainer_kit.utils.pruning import is_pruned
from trainer_kit.utils.pytree import flatten_state
from trainer_kit.utils.rng import generator_states
from trainer_kit.utils.wrappers import model_class, without_wrappers

logger = logging.getLogger("trainer_kit")

SPOILED = "after it, with values that are not finite"
"""Value of `report["weights_are"]` for weights that cannot reproduce the failure."""

_LONGEST_DESCRIPTION = 2000
_ROOM = 8
"""Required free space as a multiple of the weights' size: each process may write its own."""
_PACKAGES = ("trainer_kit", "torch", "numpy", "transformers")


class FailureSite(NamedTuple):
    """Position of the failure.

    Attributes:
        step: Current step, or else the last one taken.
        epoch: Number of its epoch, from 0; None between two steps.
        position: Position in the epoch before the step.
        fetching: Whether the step's samples were being read.
    """

    step: int
    epoch: int | None = None
    position: int = 0
    fetching: bool = False


class RecordedBatch(NamedTuple):
    """A micro-batch of the step, as far as it is available.

    Attributes:
        start: Position of its first sample in the epoch.
        sample_ids: Dataset indices; None for iterable datasets.
        work: Micro-batch for `diagnose`; its batch is None if it is not available.
        repeats: How often the epoch had each sample before; None if it has none twice.
    """

    start: int
    sample_ids: list[int] | None
    work: Work
    repeats: list[int] | None = None


class CrashDump:
    """Writes the state of a run that ended with an error.

    Args:
        run: Run with model, optimizer and counters, after a checkpoint is loaded.
        loss: Loss of the run.
        loader: Loader of the training batches.
    """

    def __init__(self, run: Run, loss: Loss, loader: TrainLoader | StreamLoader) -> None:
        self.run = run
        self.loss = loss
        self.loader = loader
        self._first_step = run.state.step

    def write(
        self,
        error: BaseException,
        newest_checkpoint: Path | None = None,
        micro: MicroBatch | None = None,
        fetching: bool = False,
    ) -> Path | None:
        """Write `output_dir/crash-STEP` (on processes other than the main one `crash-STEP-rank-RANK`).

        It synchronizes with the device, and is not collective: where the model is sharded, the folder holds no weights,
        and a non-finite step is not run again. A process writes only for its own error, not for the consequence of
        another process's end, a failed save, a pruned trial of optuna, a request to leave, or Ctrl-C; nor for one
        before its first step.

        Args:
            error: Error that ends the run.
            newest_checkpoint: Path for the report; None if there is none.
            micro: Micro-batch that was processed last; None if there is none.
            fetching: Whether a micro-batch of the current step was being fetched.

        Returns:
            The folder; None if there is nothing to write, or the write failed.
        """
        if not isinstance(error, Exception) or self._is_elsewhere(error):
            return None
        try:
            return self._write(error, newest_checkpoint, micro, fetching)
        except Exception as second:
            logger.error("the state of the run could not be kept for a replay: %s: %s", type(second).__name__, second)
            return None

    def _is_elsewhere(self, error: Exception) -> bool:
        """Return whether the cause is not in this process's step."""
        if isinstance(error, (SaveError, FolderInUseError, CutOffError)) or is_pruned(error):
            return True
        if self.run.strategy.collectives.is_alone:
            return False
        from trainer_kit.errors import LostProcessError

        return isinstance(error, LostProcessError)

    def _write(
        self, error: Exception, newest_checkpoint: Path | None, micro: MicroBatch | None, fetching: bool
    ) -> Path | None:
        run = self.run
        generators = self._generators()  # before samples are read again, which sets new seeds
        scene, missing = self._scene(error, micro, fetching), _Missing()
        if scene.epoch is None and scene.step == self._first_step:
            return None  # no step has been taken or begun
        scene, pieces = self._pieces(error, scene, micro, missing)
        works = [piece.work for piece in pieces if piece.work.batch is not None]
        found = None
        if isinstance(error, NonFiniteError) and works and not run.strategy.sharding.is_active:
            found = diagnose(self.loss, works, run.strategy)
        if not run.strategy.is_main and (scene.epoch is None or (found is not None and found.is_finite)):
            return None  # the failure belongs to another process
        report = self._report(error, scene, pieces, newest_checkpoint, missing)
        report["found"] = _told(error, run.model) if found is None else _findings(found, pieces)
        states = {"batch": self._batch(pieces, missing), "rng": generators, "report": report}
        name = f"{CRASH_PREFIX}{scene.step}" + (f"-rank-{run.strategy.rank}" if not run.strategy.is_main else "")
        folder = self._commit(name, scene.step, self._weights(error, report), states)
        replay = f"; on the CPU it is run again by: trainer-kit replay {shlex.quote(str(folder))} {_script()}"
        logger.error(
            "the state of the run in step %d is kept in %s%s%s",
            scene.step,
            folder,
            replay if works else "",
            f" (without {'; '.join(missing)})" if missing else "",
        )
        return folder

    def _scene(self, error: Exception, micro: MicroBatch | None, fetching: bool) -> FailureSite:
        state = self.run.state
        if isinstance(error, NonFiniteError):
            taken = error.span
            return FailureSite(state.step) if taken is None else FailureSite(taken.step, taken.epoch, taken.start)
        if fetching:
            return FailureSite(state.step + 1, state.epoch, state.position, fetching=True)
        if micro is None or (state.epoch, state.position) >= (micro.global_batch.epoch, micro.global_batch.stop):
            return FailureSite(state.step)
        return FailureSite(state.step + 1, micro.global_batch.epoch, micro.global_batch.start)

    # The batch

    def _pieces(
        self, error: Exception, scene: FailureSite, micro: MicroBatch | None, missing: _Missing
    ) -> tuple[FailureSite, list[RecordedBatch]]:
        """Return this process's micro-batches of the step, and the step's position."""
        if scene.epoch is None:
            missing.append("batch: no step was being taken")
        elif scene.fetching and self.loader.reading.workers and not _is_of_the_dataset(error):
            missing.append("batch: a worker that read it has ended or hangs, as this process might by reading it again")
        elif isinstance(self.loader, TrainLoader):
            return self._read_again(self.loader, scene, missing)
        elif micro is None:
            missing.append("batch: the dataset raised while it was read")
        elif scene.step < self.run.state.step:
            missing.append(
                "batch: an iterable dataset cannot be read again; set logging_steps=1, so that the error is noticed "
                "while the batch is in memory"
            )
        else:
            return scene, [self._at_hand(micro, missing)]
        return scene, []

    def _at_hand(self, micro: MicroBatch, missing: _Missing) -> RecordedBatch:
        if micro.index:
            missing.append(f"batch: the {micro.index} micro-batches before the last one, which cannot be read again")
        seed = mix(self.run.args.seed, micro.global_batch.epoch, micro.start)
        batch = micro.batch if micro.unfilled is None else micro.unfilled
        return RecordedBatch(micro.start, None, Work(batch, seed, micro.samples, micro.counts.samples > 0))

    def _read_again(
        self, loader: TrainLoader, scene: FailureSite, missing: _Missing
    ) -> tuple[FailureSite, list[RecordedBatch]]:
        """Read the batches again: the seed determines the order of samples and their randomness."""
        assert scene.epoch is not None
        fetcher, first = Fetcher(loader.dataset, loader.reading.collate, loader.reading.seed), None
        # The device prefetches one batch: an unreadable sample may belong to the next step.
        for ahead, window in enumerate(_windows(loader, scene.epoch, scene.position, 2 if scene.fetching else 1)):
            found = scene._replace(step=scene.step + ahead, position=window[0].window_start)
            seeds = [mix(self.run.args.seed, slot.epoch, slot.start) for slot in window]
            pieces = [
                RecordedBatch(
                    slot.start, slot.indices, Work(None, seed, len(slot.indices), not slot.is_dummy), slot.repeats
                )
                for slot, seed in zip(window, seeds, strict=True)
            ]
            try:
                for number, slot in enumerate(window):
                    work = pieces[number].work._replace(batch=fetcher[slot][1])
                    pieces[number] = pieces[number]._replace(work=work)
            except Exception as error:
                missing.append(f"batch: its samples could not be read: {type(error).__name__}: {error}")
                return found, pieces
            first = first or (found, pieces)
        return first or (scene, [])

    def _batch(self, pieces: list[RecordedBatch], missing: _Missing) -> list[dict[str, Any]]:
        kept = []
        for number, piece in enumerate(pieces):
            before = len(missing)
            kept.append(
                {
                    "start": piece.start,
                    "sample_ids": piece.sample_ids,
                    "repeats": piece.repeats,
                    "seed": piece.work.seed,
                    "samples": piece.work.samples,
                    "counted": piece.work.counted,
                    "batch": _kept(piece.work.batch, f"batch[{number}]", missing),
                    "whole": piece.work.batch is not None and len(missing) == before,
                }
            )
        return kept

    # Everything else

    def _generators(self) -> dict[str, Any]:
        try:
            device = self.run.strategy.device_info.rng_state()
        except RuntimeError:  # a failed device does not respond
            device = None
        return generator_states() | {"device": device}

    def _weights(self, error: Exception, report: dict[str, Any]) -> dict[str, Any]:
        """Return the model's state with Parameter objects: on XLA only their identity shows which are tied."""
        report["weights_by_rank"] = self.run.strategy.rank
        if self.run.strategy.sharding.is_active:
            report["weights_by_rank"] = None
            report["missing"].append("weights: each process holds a part of them, and this one may have failed alone")
            return {}
        if isinstance(error, NonFiniteError):
            if not self.run.strategy.is_main:  # all processes have the same weights, and write at the same time
                report["weights_by_rank"] = 0
                return {}
        elif self.run.state.step == self._first_step:
            report["weights_by_rank"] = None
            report["missing"].append(
                "weights: no step had been taken, they are what the script or a resume begins with"
            )
            return {}
        state = without_wrappers(self.run.model).state_dict(keep_vars=True)
        size = sum(tensor.nbytes for tensor in split_values(state)[0].values())
        if shutil.disk_usage(self.run.args.output_dir).free < _ROOM * size:  # checkpoints come first
            report["weights_by_rank"] = None
            report["missing"].append("weights: the disk has little room left, which checkpoints need")
            return {}
        return state

    def _report(
        self,
        error: Exception,
        scene: FailureSite,
        pieces: list[RecordedBatch],
        newest_checkpoint: Path | None,
        missing: _Missing,
    ) -> dict[str, Any]:
        run, strategy = self.run, self.run.strategy
        weights_are, parameter = "as they were when the error was raised", None
        if isinstance(error, NonFiniteError):
            parameter = error.parameter
            weights_are = "before the step" if error.held else SPOILED
        return {
            "error": {"type": type(error).__name__, "message": str(error), "parameter": parameter},
            "causes": [f"{type(each).__name__}: {each}" for each in _causes(error)[1:]],
            "traceback": "".join(traceback.format_exception(error)).splitlines(),
            "step": scene.step,
            "epoch": scene.epoch,
            "position": scene.position if scene.epoch is not None else None,
            "sample_ids": [piece.sample_ids for piece in pieces],
            "rank": strategy.rank,
            "processes": strategy.world_size,
            "weights_are": weights_are,
            "newest_checkpoint": None if newest_checkpoint is None else str(newest_checkpoint.absolute()),
            "model": model_class(run.model).__name__,
            "shifts_labels": self.loss.shifts,
            "device": str(strategy.device),
            "precision": "no" if strategy.precision is None else strategy.precision.mode,
            "platform": platform.platform(),
            "versions": _versions(),
            "missing": missing,
        }

    def _commit(self, name: str, step: int, weights: dict[str, torch.Tensor], states: dict[str, Any]) -> Path:
        """Write the folder, without the weights if they cannot be read or the disk has no room for them."""
        run, args = self.run, self.run.args

        def write(weights: dict[str, torch.Tensor]) -> Path:
            arguments, folder = args.to_dict(), Path(args.output_dir)
            snapshot = take_snapshot(step, weights, states, arguments=arguments, world_size=run.strategy.world_size)
            return write_checkpoint(
                folder,
                snapshot,
                max_shard_size=args.max_shard_size,
                name=name,
                to_host=run.strategy.device_info.to_host,
            )

        try:
            return write(weights)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            if not weights:
                raise
            states["report"]["weights_by_rank"] = None
            states["report"]["missing"].append(f"weights: they could not be written: {type(error).__name__}: {error}")
            return write({})


def _is_of_the_dataset(error: Exception) -> bool:
    """Return whether the dataset raised the error; otherwise a worker was killed, or hangs."""
    return isinstance(error, DataError) and not isinstance(error, WorkerError)


_Missing = list[str]
"""Sentences on missing contents of the folder, with reasons."""


def _windows(loader: TrainLoader, epoch: int, position: int, steps: int) -> Iterator[list[BatchIndices]]:
    """Yield this process's micro-batches of the next steps in the epoch."""
    window: list[BatchIndices] = []
    for slot in loader.slots_of(epoch, position):
        window.append(slot)
        if slot.is_last:
            yield window
            window, steps = [], steps - 1
            if steps == 0:
                return


def _kept(tree: Any, place: str, missing: _Missing) -> Any:
    """Return a storable copy of a batch; values that cannot be stored are described, and named in `missing`."""
    if isinstance(tree, Mapping):
        return {
            key if isinstance(key, (str, int)) else repr(key): _kept(value, f"{place}[{key!r}]", missing)
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        items = [_kept(value, f"{place}[{number}]", missing) for number, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    try:
        for name, tensor in flatten_state(tree)[1].items():
            refuse_unstorable(name, tensor)
        return tree.detach().cpu() if isinstance(tree, torch.Tensor) else tree
    except (TypeError, ValueError):
        missing.append(f"{place}: of type {type(tree).__name__}, which cannot be stored; its description is")
        return {"described": repr(tree)[:_LONGEST_DESCRIPTION]}


def _findings(found: Diagnosis, pieces: list[RecordedBatch]) -> dict[str, Any]:
    """Return the results of the repeated step as text."""
    columns = []
    for bad in found.columns:
        ids = pieces[bad.micro_batch].sample_ids
        rows = bad.rows if ids is None else [ids[row] for row in bad.rows if row < len(ids)]
        what = "rows" if ids is None else "samples"
        columns.append(f"{bad.column} of micro-batch {bad.micro_batch} holds {bad.kind} ({what} {rows})")
    return {
        "how": "the step was run once more on the same device, each module's output and each gradient looked at",
        "loss": None if found.loss is None else str(found.loss),
        "gradient_norm": None if found.norm is None else str(found.norm),
        "first_module": None if found.module is None else found.module.place,
        "first_module_made": None if found.module is None else found.module.kind,
        "first_parameter": found.parameter,
        "inputs": columns,
        "weights": found.weights,
        "error": None if found.error is None else f"{type(found.error).__name__}: {found.error}",
    }


def _told(error: Exception, model: torch.nn.Module) -> dict[str, Any]:
    """Return the innermost module in the error's traceback."""
    names, innermost = {id(module): name for name, module in model.named_modules()}, None
    for each in _causes(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            module = frame.f_locals.get("self")
            if id(module) in names:
                innermost = f"{names[id(module)]} ({type(module).__name__})".strip()
    return {"how": "the error's own traceback", "first_module": innermost}


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and the errors that it was raised from."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _versions() -> dict[str, str]:
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: str(version) for name, version in loaded.items() if version}


def _script() -> str:
    """Return the command line of the program if it is a script."""
    return shlex.join(sys.argv) if sys.argv[0].endswith(".py") else "SCRIPT.py"

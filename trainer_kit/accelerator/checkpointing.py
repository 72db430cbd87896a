"""State that `Accelerator.save_state` writes in the format of the Trainer's checkpoints, and its restoration."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.options import ProjectConfiguration
from trainer_kit.accelerator.wrappers import AccumulationState, PreparedOptimizer, PreparedScheduler
from trainer_kit.checkpoint import (
    CheckpointError,
    Committed,
    Retention,
    find_checkpoints,
    newest_valid,
    pretrained_files,
    prune,
    read_state,
    remove_stale_staging,
    take_snapshot,
    verify,
    write_checkpoint,
)
from trainer_kit.checkpoint.format.discovery import is_of_run, recover_replaced
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.checkpoint.format.manifest import STATE_FOLDER, Manifest, list_files
from trainer_kit.checkpoint.format.trainer_state import BOOL, COUNT, OBJECT, TEXT, WHOLE, CheckedFile, or_none
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.rng import generator_states, set_generator_states

logger = logging.getLogger("trainer_kit")

PREFIX = "checkpoint_"


@dataclasses.dataclass
class Prepared:
    """All objects that an Accelerator has prepared, in order, and those registered for checkpointing."""

    models: list[torch.nn.Module] = dataclasses.field(default_factory=list)
    optimizers: list[PreparedOptimizer] = dataclasses.field(default_factory=list)
    schedulers: list[PreparedScheduler] = dataclasses.field(default_factory=list)
    loaders: list[PreparedLoader] = dataclasses.field(default_factory=list)
    registered: list[Any] = dataclasses.field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the number of objects of each kind."""
        kinds = ("models", "optimizers", "schedulers", "loaders")
        return {kind: len(getattr(self, kind)) for kind in kinds}

    def clear(self) -> None:
        """Drop all references."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).clear()


class States:
    """Saves and loads the state of a hand-written loop.

    Args:
        strategy: Strategy that is set up.
        flow: Accumulation state of the loop.
        prepared: Objects to save.
        project: Where checkpoints without an explicit folder go.
        settings: Settings written to each checkpoint for the user; not restored.

    Attributes:
        run_id: Identifier shared by all starts that resume one another; only checkpoints with it are pruned.
    """

    def __init__(
        self,
        strategy: Strategy,
        flow: AccumulationState,
        prepared: Prepared,
        project: ProjectConfiguration,
        settings: dict[str, Any],
    ) -> None:
        self.strategy = strategy
        self.flow = flow
        self.prepared = prepared
        self.project = project
        self.settings = settings
        self.run_id = uuid.uuid4().hex

    # Saving

    def save(self, output_dir: Path | None) -> Path:
        """Commit a checkpoint. Collective.

        Args:
            output_dir: Folder of the checkpoint; None for the next numbered folder of the project.

        Returns:
            Folder of the checkpoint.

        Raises:
            ValueError: If there is no folder to write to, or it holds other files.
        """
        folder = self._folder(output_dir, "save_state()")
        self.flow.dispatch()  # computes all tensors in one graph, not one by one as they are read
        models = [self.strategy.model_state(model) for model in self.prepared.models]
        states = self._states()
        directory = self.strategy.collectives.on_main(lambda: self._commit(folder, output_dir, models, states))
        if output_dir is None:
            self.project.iteration = int(directory.name.removeprefix(PREFIX)) + 1
        self.strategy.session.report_saved_step(self.flow.steps)
        logger.info("saved %s", directory)
        return directory

    def _folder(self, given: Path | None, call: str) -> Path:
        """Return the folder that contains the checkpoints."""
        if given is not None:
            return given.parent
        if self.project.project_dir is None:
            raise ValueError(f"{call} needs a folder; give it one, or give Accelerator project_dir=")
        return Path(self.project.project_dir).expanduser().absolute() / "checkpoints"

    def _states(self) -> dict[str, Any]:
        """Return all state but the models' weights, by name. Collective."""
        prepared, precision = self.prepared, self.strategy.precision
        states: dict[str, Any] = {
            "accelerator": {
                "counts": prepared.counts(),
                "run_id": self.run_id,
                "steps": self.flow.steps,
                "batches": self.flow.batches,
                "schedule_steps": [each.rule.repeats for each in prepared.schedulers],
            },
            "loaders": [loader.state_dict() for loader in prepared.loaders],
            "precision": precision.state_dict() if precision is not None else {},
            "gradients": self._gradients() if self.flow.batches else {},
        }
        for name, each in _numbered("optimizer", prepared.optimizers):
            states[name] = self.strategy.optimizer_state(each.optimizer)
        for name, each in _numbered("lr_scheduler", prepared.schedulers):
            states[name] = each.state_dict()
        for name, each in self._registered():
            states[name] = each.state_dict()
        for rank, state in enumerate(self.strategy.collectives.gather_object(_generators(self.strategy))):
            states[f"rng-{rank:05d}"] = state
        return states

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of an unfinished optimizer step, summed over the processes."""
        named = self._trained()
        held = self.strategy.collectives.all_reduce_ints([int(parameter.grad is not None) for _, parameter in named])
        summed = {}
        for (name, parameter), holders in zip(named, held, strict=True):
            if holders:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                summed[name] = self.strategy.collectives.all_reduce(gradient.to_dense())
        return summed

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{number}.{name}", parameter)
            for number, model in enumerate(self.prepared.models)
            for name, parameter in self.strategy.unwrap(model).named_parameters()
            if parameter.requires_grad
        ]

    def _registered(self) -> Iterator[tuple[str, Any]]:
        """Yield the registered objects by class name: `custom_EMA`, the second `custom_EMA_1`."""
        seen: Counter[str] = Counter()
        for each in self.prepared.registered:
            name = type(each).__name__
            yield f"custom_{name}" + (f"_{seen[name]}" if seen[name] else ""), each
            seen[name] += 1

    def _commit(self, folder: Path, output_dir: Path | None, models: list[Any], states: dict[str, Any]) -> Path:
        """Write the checkpoint and prune old ones, on the main process only."""
        if output_dir is None:
            remove_stale_staging(folder)
            there = find_checkpoints(folder, PREFIX)
            number = max([self.project.iteration, *(_number(path) + 1 for path in there[-1:])])
            output_dir = folder / f"{PREFIX}{number}"
        else:
            there = []
            _refuse_to_replace(output_dir)

        named = dict(_numbered("model", models))
        snapshot = take_snapshot(
            self.flow.steps,
            named.pop("model", {}),
            states,
            arguments=self.settings,
            world_size=self.strategy.world_size,
            files=pretrained_files(self.strategy.unwrap(self.prepared.models[0]), None) if models else {},
            more_models=named,
        )
        directory = write_checkpoint(folder, snapshot, name=output_dir.name, to_host=self.strategy.device_info.to_host)
        if there and self.project.total_limit is not None:
            own = [*(path for path in there if is_of_run(path, "accelerator", self.run_id)), directory]
            committed = [Committed(path.name, _number(path)) for path in own]
            prune(folder, committed, Retention(self.project.total_limit))
        return directory

    # Loading

    def load(self, input_dir: Path | None) -> Path:
        """Restore a checkpoint. Collective.

        Args:
            input_dir: Folder of the checkpoint; None for the newest valid one of the project.

        Returns:
            Folder of the checkpoint.

        Raises:
            ValueError: If there is no checkpoint, it is damaged, or it holds other objects than those prepared.
        """
        directory = self.strategy.collectives.on_main(lambda: self._found(input_dir))
        source, prepared = self.strategy.session.fetch_checkpoint(directory), self.prepared
        if source != directory and self.strategy.collectives.is_local_main:
            verify(source)
        state = read_state(source, "accelerator")
        if state is None:
            raise ValueError(f"{directory} holds no state of save_state(); a Trainer's is resumed by the Trainer")
        _check_counts(state["counts"], prepared.counts(), directory)
        for name, model in _numbered("model", prepared.models):
            module, load_state = self.strategy.unwrap(model), self.strategy.load_model_state
            load_weights(module, source, stem=name, is_verified=True, load_state=load_state)
        for name, each in (
            *_numbered("optimizer", prepared.optimizers),
            *_numbered("lr_scheduler", prepared.schedulers),
            *self._registered(),
        ):
            if (saved := read_state(source, name)) is None:
                raise ValueError(f"{directory} holds nothing for {name}; register the same objects before load_state()")
            if isinstance(each, PreparedOptimizer):
                self.strategy.load_optimizer_state(each.optimizer, saved)
            else:
                each.load_state_dict(saved)
        if self.strategy.precision is not None:
            self.strategy.precision.load_state_dict(read_state(source, "precision") or {})
        for loader, saved in zip(prepared.loaders, read_state(source, "loaders") or [], strict=False):
            loader.load_state_dict(saved)
        self.run_id, self.flow.steps, self.flow.batches = state["run_id"], state["steps"], state["batches"]
        self._check_schedules(state.get("schedule_steps", []))
        self._restore_gradients(read_state(source, "gradients") or {})
        if (generators := read_state(source, f"rng-{self.strategy.rank:05d}")) is None:
            logger.warning("%s was made by fewer processes: this one's generators stay as they are", directory)
        else:
            _set_generators(generators, self.strategy)
        self.flow.dispatch()
        logger.info("loaded %s, saved after %d optimizer steps", directory, self.flow.steps)
        return directory

    def _found(self, input_dir: Path | None) -> Path:
        """Return the checkpoint to load, verified; on the main process only."""
        folder = self._folder(input_dir, "load_state()")
        if input_dir is None:
            found = newest_valid(folder, logger.warning, PREFIX, check=_check_state)
            if found is None:
                raise ValueError(f"load_state() found no valid checkpoint in {folder}; save_state() writes them there")
            return found
        recover_replaced(folder)
        if not input_dir.is_dir():
            raise ValueError(
                f"load_state({str(input_dir)!r}) names no folder; give one that save_state() returned, or none for the "
                "project's newest"
            )
        _check_state(input_dir)
        return input_dir

    def _check_schedules(self, saved: list[int]) -> None:
        """Warn if a schedule steps at another rate than before, because the number of processes changed."""
        for then, scheduler in zip(saved, self.prepared.schedulers, strict=False):
            if then != scheduler.rule.repeats:
                logger.warning(
                    "the checkpoint was saved where a schedule steps %d times with each optimizer step, here %d: one "
                    "made from len(loader) before prepare() goes on at the same sample, but one whose length follows "
                    "from num_processes does not; set its last_epoch",
                    then,
                    scheduler.rule.repeats,
                )
                return

    def _restore_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._trained():
            parameter.grad = None
            if name in gradients and self.strategy.rank == 0:  # the saved sum of all processes
                parameter.grad = torch.empty_like(parameter).copy_(gradients[name])


def check_stateful(objects: Iterable[Any]) -> None:
    """Raise an error for objects that cannot be saved.

    Args:
        objects: Objects to check.

    Raises:
        TypeError: If an object lacks `state_dict` or `load_state_dict`.
    """
    for each in objects:
        if not is_stateful(each):
            raise TypeError(
                f"register_for_checkpointing() got {each!r}, which has no state_dict() or load_state_dict(); only "
                "objects that have both can be kept"
            )


def is_stateful(thing: Any) -> bool:
    """Return whether an object, not a class, has `state_dict` and `load_state_dict`."""
    return not isinstance(thing, type) and hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _numbered(name: str, objects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects with names: model, model_1, model_2 and so on."""
    return ((f"{name}_{number}" if number else name, each) for number, each in enumerate(objects))


def _number(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _check_state(directory: Path) -> None:
    """Verify a checkpoint and the saved state of the loop; leave a checkpoint of another program to `load`.

    Raises:
        CheckpointError: If a file is damaged, or a value is invalid for a loop.
    """
    verify(directory)
    if (state := read_state(directory, "accelerator")) is None:
        return
    file = CheckedFile(directory / STATE_FOLDER / "accelerator.json")
    file.check(state, {"counts": OBJECT, "run_id": TEXT, "steps": COUNT, "batches": COUNT})
    file.check(state["counts"], dict.fromkeys(Prepared().counts(), COUNT), "counts.")
    file = CheckedFile(directory / STATE_FOLDER / "loaders.json")
    loaders = read_state(directory, "loaders")
    count = state["counts"]["loaders"]
    holds = isinstance(loaders, list) and len(loaders) == count
    file.require(holds, "the list", loaders, f"of the {count} loaders")
    for number, loader in enumerate(loaders or []):
        file.check(loader, {"epoch": COUNT, "position": COUNT, "open": BOOL, "complete": BOOL, "seed": WHOLE,
                            "total_batch_size": or_none(COUNT)}, f"[{number}].")  # fmt: skip


def _check_counts(saved: dict[str, int], now: dict[str, int], directory: Path) -> None:
    for kind, count in saved.items():
        if kind == "loaders" and count < now[kind]:
            logger.info(
                "%s holds the state of %d loaders: those prepared after them start from the beginning", directory, count
            )
        elif kind != "models" and count and not now[kind]:
            logger.info("the state of %d %s in %s is left out, since none is prepared", count, kind, directory)
        elif count != now[kind]:
            raise ValueError(
                f"{directory} holds the state of {count} {kind}, but {now[kind]} are prepared; prepare() the same "
                "objects in the same order before load_state()"
            )


def _refuse_to_replace(directory: Path) -> None:
    """Check that the folder holds only a checkpoint, since saving replaces the whole folder.

    Raises:
        ValueError: If the folder holds other files.
    """
    if not directory.exists():
        return
    try:
        known = Manifest.read(directory).files
        others = [path.name for path in list_files(directory) if path.relative_to(directory).as_posix() not in known]
    except CheckpointError:
        others = [path.name for path in directory.iterdir()] + ["manifest.json"]
    if others := [name for name in others if name != "manifest.json"]:
        raise ValueError(
            f"save_state() would replace {directory}, which holds {others[0]!r}; give a folder that holds nothing but "
            "a checkpoint"
        )


def _generators(strategy: Strategy) -> dict[str, Any]:
    return generator_states() | {"device": strategy.device_info.rng_state()}


def _set_generators(states: dict[str, Any], strategy: Strategy) -> None:
    set_generator_states(states)
    strategy.device_info.set_rng_state(states.get("device"))

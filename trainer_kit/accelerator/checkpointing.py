"""Checkpoints of an `Accelerator`, in the format of the Trainer's."""

from __future__ import annotations

import logging
import os
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_kit.accelerator.model_saving import ModelSaving
from trainer_kit.accelerator.partial_gradients import partial_gradients, restore_gradients
from trainer_kit.accelerator.prepared import Prepared
from trainer_kit.accelerator.project_lock import ProjectLock, lock_project
from trainer_kit.accelerator.save_meeting import SaveMeeting
from trainer_kit.accelerator.state_hooks import StateHooks
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin, ProjectConfiguration
from trainer_kit.accelerator.validation import (
    check_counts,
    check_replaceable,
    check_state,
    is_stateful,
    keep_other_files,
    kept_by_hooks,
    link_files,
    numbered,
    open_hook_folder,
)
from trainer_kit.accelerator.wrappers import PreparedOptimizer
from trainer_kit.checkpoint import (
    Committed,
    Retention,
    Snapshot,
    find_checkpoints,
    newest_valid,
    pretrained_files,
    prune,
    read_state,
    remove_stale_staging,
    take_snapshot,
    write_checkpoint,
)
from trainer_kit.checkpoint.format.commit import staging_folder
from trainer_kit.checkpoint.format.discovery import is_of_run, recover_replaced
from trainer_kit.checkpoint.format.disk import make_run_folder, remove_folder
from trainer_kit.checkpoint.format.export import refuse_pickles
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.checkpoint.integrity import fetch_verified
from trainer_kit.checkpoint.optimizer_states import read_optimizer_state
from trainer_kit.checkpoint.shared_checks import CheckFiles, find_on_main
from trainer_kit.checkpoint.writers import Writers
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.optimizer_state import check_optimizer_state
from trainer_kit.utils.parameter_order import add_model_names
from trainer_kit.utils.rng import generator_states, set_generator_states
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn

logger = logging.getLogger("trainer_kit")

PREFIX = "checkpoint_"


class Checkpointing(StateHooks, ModelSaving):
    """The part of an `Accelerator` that saves and loads.

    Args:
        strategy: Strategy that is set up before the first save.
        log_with: See `Accelerator`.
        project: Where files go.
        accumulation: Settings of gradient accumulation.
    """

    def __init__(
        self,
        strategy: Strategy,
        log_with: Any,
        project: ProjectConfiguration,
        accumulation: GradientAccumulationPlugin | None = None,
    ) -> None:
        super().__init__(strategy, log_with, project, accumulation)
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._prepared = Prepared()
        self._lock: ProjectLock | None = None  # on the main process, after the first save to a numbered folder
        self._settings: dict[str, Any] = {}  # written to each checkpoint for the user; not restored
        self._meeting = SaveMeeting()
        self._run_id = uuid.uuid4().hex  # shared by all starts that resume one another; only its checkpoints are pruned

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that is saved without a folder."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Commit a checkpoint of everything that was prepared or registered. Collective.

        It holds models, optimizers, schedulers, loader positions, fp16's scale, the gradients of an unfinished
        optimizer step, and the generators of every process. A resumed run is bitwise equal to an uninterrupted one. It
        is equal up to rounding where several processes save within an optimizer step, since the checkpoint keeps the
        sum of their gradients. What no `state_dict` has is not in it: buffers that are not persistent, and random
        generators that your objects keep for themselves; `register_for_checkpointing` takes an object that holds them.

        All processes that see the folder write a share. If there are hooks, the main process calls them with the whole
        states, and writes alone.

        A call on the main process alone, under `is_main_process`, is possible too, with a warning: once the others are
        seen to wait elsewhere, the main process saves without their generators, and a resume is not bitwise equal.

        Args:
            output_dir: Folder of the checkpoint. A checkpoint in it is replaced, other files stay. None for
                `project_dir/checkpoints/checkpoint_N` with ascending numbers, of which `total_limit` are kept.
            safe_serialization: Must be True: pickles are not written.
            **save_model_func_kwargs: Without effect, which a warning says.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: If there is no folder to write to, or it is the working directory or contains it; or an
                optimizer's state cannot be saved and loaded; or only some processes call this; or only the main one
                does, with sharded models or within an optimizer step.
            FolderInUseError: If another process saves to numbered folders of `project_dir`, until it ends or calls
                `end_training`.
        """
        refuse_pickles(safe_serialization)
        _name_ignored("save_state", save_model_func_kwargs)
        project = self.project_configuration
        given = _absolute(None if project.automatic_checkpoint_naming else output_dir)
        folder = self._folder(given, "save_state()")
        with self._meeting.together_or_alone(self.strategy, is_within_step=self.flow.batches > 0) as is_alone:
            self.flow.dispatch()  # computes all tensors in one graph, not one by one as they are read
            self.strategy.collectives.on_main(self._check_optimizers)
            target = self.strategy.collectives.on_main(lambda: self._target(folder, given))
            models = [self.strategy.model_state(model) for model in self._prepared.models]
            if self._save_hooks or is_alone:
                directory = self._write_on_main(target, given is None, models)
            else:
                directory = self._write_together(target, given is None, models, self._states())
            self.strategy.collectives.on_main(lambda: self._prune(directory, given is None))
        if given is None:
            project.iteration = int(directory.name.removeprefix(PREFIX)) + 1
        self.strategy.session.report_saved_step(self.flow.steps)
        logger.info("saved %s", directory)
        return str(directory)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore a checkpoint of `save_state`, after the same objects are prepared. Collective.

        Args:
            input_dir: Folder of the checkpoint; None for the newest valid one of the project.
            load_kwargs: Without effect, which a warning says: tensors are loaded to the devices of the prepared
                objects, and names must agree.
            **load_model_func_kwargs: Without effect, too, such as `map_location`.

        Raises:
            ValueError: If there is no checkpoint, it is damaged, or it holds other objects; the message names the
                difference.
        """
        _name_ignored("load_state", (load_kwargs or {}) | load_model_func_kwargs)
        given, prepared = _absolute(input_dir), self._prepared
        directory = find_on_main(self.strategy, lambda check: self._found(given, check))
        source = fetch_verified(self.strategy, directory)
        state = read_state(source, "accelerator")
        if state is None:
            raise ValueError(f"{directory} holds no state of save_state(); a Trainer's is resumed by the Trainer")
        check_counts(state["counts"], prepared.counts(), directory)
        models = [*prepared.models]
        for hook in self._load_hooks.values():
            hook(models, str(directory))
        self._restore_objects(source, directory, models)
        if self.strategy.precision is not None:
            self.strategy.precision.load_state_dict(read_state(source, "precision") or {})
        for loader, saved in zip(prepared.loaders, read_state(source, "loaders") or [], strict=False):
            loader.load_state_dict(saved)
        self._run_id, self.flow.steps, self.flow.batches = state["run_id"], state["steps"], state["batches"]
        self._check_schedules(state.get("schedule_steps", []))
        restore_gradients(self.strategy, prepared.models, read_state(source, "gradients") or {})
        if (generators := read_state(source, f"rng-{self.strategy.rank:05d}")) is None:
            logger.warning("%s lacks the random generators of this process: they stay as they are", directory)
        else:
            set_generator_states(generators)
            self.strategy.device_info.set_rng_state(generators.get("device"))
        self.strategy.session.release_checkpoint_copies()
        self.flow.dispatch()
        logger.info("loaded %s, saved after %d optimizer steps", directory, self.flow.steps)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects with `state_dict` and `load_state_dict` to every checkpoint.

        Raises:
            TypeError: If an object lacks one of them.
        """
        for each in objects:
            if not is_stateful(each):
                raise TypeError(
                    f"register_for_checkpointing() got {each!r}, which has no state_dict() or load_state_dict(); only "
                    "objects that have both can be kept"
                )
        self._prepared.registered.extend(objects)

    def end_training(self) -> None:
        try:
            super().end_training()
        finally:
            if self._lock is not None:
                self._lock.remove_user(self)

    def _folder(self, given: Path | None, call: str) -> Path:
        """Return the folder that contains the checkpoints."""
        if given is not None:
            return given.parent
        if self.project_configuration.project_dir is None:
            raise ValueError(f"{call} needs a folder; give it one, or give Accelerator project_dir=")
        return Path(self.project_configuration.project_dir).expanduser().absolute() / "checkpoints"

    def _check_optimizers(self) -> None:
        for each in self._prepared.optimizers:
            check_optimizer_state(each.optimizer)

    def _states(self) -> dict[str, Any]:
        """Return all state but the models' weights, by name. Collective."""
        prepared, precision = self._prepared, self.strategy.precision
        states: dict[str, Any] = {
            "accelerator": {
                "counts": prepared.counts(),
                "run_id": self._run_id,
                "steps": self.flow.steps,
                "batches": self.flow.batches,
                "schedule_steps": [each.rule.repeats for each in prepared.schedulers],
            },
            "loaders": [loader.state_dict() for loader in prepared.loaders],
            "precision": precision.state_dict() if precision is not None else {},
            "gradients": partial_gradients(self.strategy, prepared.models) if self.flow.batches else {},
        }
        for name, each in numbered("optimizer", prepared.optimizers):
            states[name] = self.strategy.optimizer_state(each.optimizer)
            add_model_names(states[name], each.optimizer, self._parameter_names())
        for name, each in numbered("lr_scheduler", prepared.schedulers):
            states[name] = each.state_dict()
        for name, each in self._registered():
            states[name] = each.state_dict()
        generators = generator_states() | {"device": self.strategy.device_info.rng_state()}
        for rank, state in enumerate(self.strategy.collectives.gather_object(generators)):
            states[f"rng-{rank:05d}"] = state
        return states

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {
            parameter: f"{stem}.{name}"
            for stem, model in numbered("model", self._prepared.models)
            for parameter, name in self.strategy.parameter_names(model).items()
        }

    def _registered(self) -> Iterator[tuple[str, Any]]:
        """Yield the registered objects by class name: `custom_EMA`, the second `custom_EMA_1`."""
        seen: Counter[str] = Counter()
        for each in self._prepared.registered:
            name = type(each).__name__
            yield f"custom_{name}" + (f"_{seen[name]}" if seen[name] else ""), each
            seen[name] += 1

    def _target(self, folder: Path, given: Path | None) -> Path:
        """Return the folder of the checkpoint to save, on the main process only."""
        if given is None:
            self._lock = lock_project(folder.parent, self)
            remove_stale_staging(folder)
            there = find_checkpoints(folder, PREFIX)
            number = max([self.project_configuration.iteration, *(_number(path) + 1 for path in there[-1:])])
            given = folder / f"{PREFIX}{number}"
        else:
            check_replaceable(given)
        return given

    def _write_on_main(self, target: Path, is_numbered: bool, models: list[Any]) -> Path:
        """Call the hooks with the whole models, and write the checkpoint on the main process.

        Collective, unless the main process saves alone.
        """
        models = self.strategy.sharding.collect_on_main(models)
        before = [*models]
        written = self.strategy.collectives.on_main(lambda: open_hook_folder(target))
        try:
            for hook in self._save_hooks.values():
                hook([*self._prepared.models], models, str(written))
            self.wait_for_everyone()  # their files are part of the checkpoint
            states = self.strategy.sharding.collect_on_main(self._states())  # hooks may draw random numbers
            directory = self.strategy.collectives.on_main(
                lambda: write_checkpoint(
                    target.parent,
                    self._snapshot(kept_by_hooks("model", before, models), states),
                    name=target.name,
                    to_host=self.strategy.device_info.to_host,
                    confirm=lambda: self._confirm(target, is_numbered, written),
                )
            )
        finally:
            if self.is_main_process:
                remove_folder(written.parent)
        return directory

    def _write_together(self, target: Path, is_numbered: bool, models: list[Any], states: dict[str, Any]) -> Path:
        """Write the checkpoint on all processes that see its folder. Collective."""
        shared = ["gradients", *(name for name, _ in numbered("optimizer", self._prepared.optimizers))]
        writers, snapshot = Writers(self.strategy, shared, "5GB"), Future[Snapshot]()
        try:
            snapshot.set_result(self._snapshot(dict(numbered("model", models)), states))
        except Exception as error:  # the others wait for this process
            snapshot.set_exception(error)
        self.strategy.collectives.on_main(lambda: make_run_folder(target.parent))
        writers.ranks = self.strategy.session.find_writers(target.parent)
        return writers.write_now(target, snapshot, lambda: self._confirm(target, is_numbered, None))

    def _confirm(self, target: Path, is_numbered: bool, written: Path | None) -> None:
        """Add files of hooks and of the user to a checkpoint that is about to be committed."""
        if is_numbered and self._lock is not None:
            self._lock.confirm()
        if written is not None:
            link_files(written, staging_folder(target), is_flushed=False)
        keep_other_files(target, staging_folder(target))

    def _snapshot(self, models: dict[str, Any], states: dict[str, Any]) -> Snapshot:
        has_model = "model" in models and self.is_main_process
        return take_snapshot(
            self.flow.steps,
            models.pop("model", None),
            states,
            arguments=self._settings,
            world_size=self.strategy.world_size,
            files=pretrained_files(self.strategy.unwrap(self._prepared.models[0]), None) if has_model else {},
            more_models=models,
        )

    def _prune(self, directory: Path, is_numbered: bool) -> None:
        """Remove old checkpoints of this run; on the main process only."""
        if is_numbered and self.project_configuration.total_limit is not None:
            there = find_checkpoints(directory.parent, PREFIX)
            own = [path for path in there if path == directory or is_of_run(path, "accelerator", self._run_id)]
            committed = [Committed(path.name, _number(path)) for path in own]
            prune(directory.parent, committed, Retention(self.project_configuration.total_limit))

    def _found(self, input_dir: Path | None, check_files: CheckFiles) -> Path:
        """Return the checkpoint to load, verified; on the main process only."""
        folder = self._folder(input_dir, "load_state()")
        if input_dir is None:
            found = newest_valid(folder, logger.warning, PREFIX, check=partial(check_state, check_files=check_files))
            if found is None:
                raise ValueError(f"load_state() found no valid checkpoint in {folder}; save_state() writes them there")
            return found
        recover_replaced(folder)
        if not input_dir.is_dir():
            raise ValueError(
                f"load_state({str(input_dir)!r}) names no folder; give one that save_state() returned, or none for the "
                "project's newest"
            )
        check_state(input_dir, check_files)
        return input_dir

    def _restore_objects(self, source: Path, directory: Path, models: list[torch.nn.Module]) -> None:
        """Restore these models, optimizers, schedulers and registered objects from `source`, a copy of `directory`."""
        prepared = self._prepared
        for name, model in kept_by_hooks("model", prepared.models, models).items():
            load_weights(
                self.strategy.unwrap(model),
                source,
                stem=name,
                is_verified=True,
                load_state=self.strategy.load_model_state,
                placement=self.strategy.sharding.placement,
            )
        for name, each in (
            *numbered("optimizer", prepared.optimizers),
            *numbered("lr_scheduler", prepared.schedulers),
            *self._registered(),
        ):
            is_optimizer = isinstance(each, PreparedOptimizer)
            saved = (
                read_optimizer_state(
                    source, name, each.optimizer, self._parameter_names(), self.strategy.sharding.placement
                )
                if is_optimizer
                else read_state(source, name)
            )
            if saved is None:
                raise ValueError(f"{directory} holds nothing for {name}; register the same objects before load_state()")
            if is_optimizer:
                self.strategy.load_optimizer_state(each.optimizer, saved)
            else:
                each.load_state_dict(saved)

    def _check_schedules(self, saved: list[int]) -> None:
        """Warn if a schedule steps at another rate than before, because the number of processes changed."""
        for then, scheduler in zip(saved, self._prepared.schedulers, strict=False):
            if then != scheduler.rule.repeats:
                logger.warning(
                    "the checkpoint was saved where a schedule steps %d times with each optimizer step, here %d: one "
                    "made from len(loader) before prepare() continues at the same sample, but one whose length follows "
                    "from num_processes does not; set its last_epoch",
                    then,
                    scheduler.rule.repeats,
                )
                return


def _name_ignored(call: str, given: Mapping[str, Any]) -> None:
    if given:
        warn(f"Accelerator.{call}: {join_names([*given], most=None)} without effect")


def _number(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _absolute(directory: str | os.PathLike[str] | None) -> Path | None:
    return None if directory is None else Path(directory).expanduser().absolute()

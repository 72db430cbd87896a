"""`Recorder`: records, one line per step, everything in which two starts of a run must agree."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainer_kit.callback import Callback
from trainer_kit.data.map_loader import MicroBatch
from trainer_kit.run import Run
from trainer_kit.tools.verify.compare import Line, first_difference, read_lines, records_file
from trainer_kit.tools.verify.fingerprints import attributes, leaves, marks, parts_of, sample_marks, state_marks
from trainer_kit.tools.verify.kill_plan import MOMENTS, Kill, checkpoint_step
from trainer_kit.trainer import Trainer
from trainer_kit.utils.pytree import flatten_state


@dataclasses.dataclass(frozen=True)
class RecordedStart:
    """Settings of one start of the script.

    Attributes:
        name: Name of the files that it writes.
        folder: Folder of these files.
        output_dir: The run's folder, in `folder`.
        steps: Last step.
        seed: Chooses the step of the checkpoint if `save_at` is None.
        chance: Seeds the generators before the script begins.
        save_at: Step of the checkpoint; None to choose it.
        resume: Whether it resumes from that checkpoint.
        against: Name of the start to compare with, in order to stop after the first different step; None for none.
        kill: Point at which it kills itself; None for none.
        dump: Step and name of a tensor to write to a file; None for none.
    """

    name: str
    folder: str
    output_dir: str
    steps: int
    seed: int
    chance: int
    save_at: int | None = None
    resume: bool = False
    against: str | None = None
    kill: Kill | None = None
    dump: tuple[int, str] | None = None

    def dumps(self) -> str:
        """Return the settings as a command-line argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> RecordedStart:
        """Return the settings from the result of `dumps`."""
        values = json.loads(text)
        kill, dump = values.pop("kill"), values.pop("dump")
        return cls(**values, kill=kill and Kill(**kill), dump=dump and (dump[0], dump[1]))


class Recorder:
    """Watches a training through two callbacks, one before all others and one after them.

    It writes a step's line when the next step begins or training ends, so that the line includes evaluation and
    checkpoint of the step. The first line is the initial state.

    Args:
        trainer: Trainer that is about to train.
        start: Settings of this start.
    """

    def __init__(self, trainer: Trainer, start: RecordedStart) -> None:
        self.trainer = trainer
        self.start = start
        self.callbacks: list[Callback] = [_First(self), _Last(self)]
        self.file = records_file(Path(start.folder), start.name, trainer.run.strategy.rank)
        self.expected: dict[int, Line] | None = None
        self.is_different = False
        self.last_step = start.steps
        self.save_at = start.save_at
        self._step: dict[str, dict[str, str]] = {}  # marks of the current step so far
        self._fetched: deque[tuple[MicroBatch, dict[str, str], list[str]]] = deque()
        self._has_begun = False

    def watch_batches(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """Record micro-batches on their way to the loop, which prefetches one."""
        for micro in micro_batches:
            if isinstance(micro, MicroBatch):
                self._fetched.append((micro, marks(micro.batch), sample_marks(micro.batch)))
            yield micro

    def begin(self, run: Run) -> None:
        """Determine the values that depend on the training's length, and write the header."""
        start = self.start
        self.file = records_file(Path(start.folder), start.name, run.strategy.rank)
        self.last_step = min(start.steps, run.total_steps)
        if self.save_at is None:
            self.save_at = checkpoint_step(start.seed, self.last_step)
        if start.against is not None:
            against = records_file(Path(start.folder), start.against, run.strategy.rank)
            self.expected = {line.step: line for line in read_lines(against)[1]}
        self._write({"total_steps": run.total_steps, "save_at": self.save_at}, "w")

    def between_steps(self, run: Run) -> None:
        """Write the line of the completed step."""
        if self.is_different:
            return
        live, states = self._live(run), self._states(run)
        parts = {**self._step, **{name: marks(tree) for name, tree in live.items()}}
        parts["states"], live["states"] = {}, {}
        for name, (tree, tensors) in states.items():
            parts["states"] |= state_marks(tree, tensors, name)
            live["states"] |= {f"{name}.{place}": tensor for place, tensor in tensors.items()}
        line = Line(run.state.step, parts, {"attributes": self._attributes(run)})
        if self._has_begun:
            self._add_batches(line, live)
        self._write(dataclasses.asdict(line), "a")
        is_restored, self._has_begun, self._step = self.start.resume and not self._has_begun, True, {}
        expected = self.expected.get(line.step) if self.expected is not None else None
        difference = first_difference(expected, line, is_restored) if expected is not None else None
        if difference is not None:
            self.is_different = True
            self._dump(live, line.step, f"{difference.part}.{difference.name}")
        if self.start.dump is not None and self.start.dump[0] == line.step:
            self._dump(live, *self.start.dump)

    def note(self, part: str, found: Mapping[str, str]) -> None:
        """Add marks to the current step.

        Args:
            part: One of `PARTS`.
            found: Marks by name.
        """
        self._step.setdefault(part, {}).update(found)

    def end_step(self, run: Run) -> None:
        """Record loss and norm, and request the checkpoint or the end."""
        assert run.local_loss is not None
        self.note("loss", {"": _number(run.local_loss)})
        if run.last_norms is not None:
            self.note("gradients", {"norm": _number(run.last_norms.total)})
        if run.state.step == self.save_at:
            run.requests.save = True
        if run.state.step >= self.last_step or self.is_different:
            run.requests.stop = True

    def at(self, moment: str, run: Run) -> None:
        """Kill this process at the planned point.

        Args:
            moment: One of `MOMENTS`.
            run: The run.
        """
        kill = self.start.kill
        step = run.state.step + (moment != "on_step_end")  # the step is counted just before on_step_end
        if kill is not None and (kill.step, kill.moment, kill.rank) == (step, moment, run.strategy.rank):
            Path(self.start.folder, f"{self.start.name}.killed").touch()
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def _add_batches(self, line: Line, live: dict[str, dict[str, Any]]) -> None:
        """Add the micro-batches of the completed step; the queue may already hold one of the next step."""
        ids, contents, samples = {"place": f"epoch {self.trainer.run.state.epochs!r}"}, {}, []
        live["batch"] = {}
        while True:
            micro, found, rows = self._fetched.popleft()
            name = f"micro-batch {micro.index}"
            ids[name] = ",".join(map(str, micro.indices))
            contents.update({f"{name}.{place}": mark for place, mark in found.items()})
            live["batch"].update({f"{name}.{place}": value for place, value in leaves(micro.batch)})
            samples += rows
            if micro.is_last:
                break
        line.parts["ids"], line.parts["batch"] = ids, contents
        line.hints["samples"] = {str(number): mark for number, mark in enumerate(samples)}

    def _live(self, run: Run) -> dict[str, dict[str, Any]]:
        """Return the tensors and numbers that a resume must restore, by part and name."""
        saved = run.model.state_dict().keys()
        tensors = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}
        return {
            "model": {name: tensor for name, tensor in tensors.items() if name in saved},
            "unsaved": {name: tensor for name, tensor in tensors.items() if name not in saved},
            "optimizer": _optimizer_state(run),
        }

    def _states(self, run: Run) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
        """Return the states that a resume must restore, by owner, in the form of a checkpoint."""
        callbacks = self.trainer.events.state_dict()
        states = {f"callback {name}": _without_clock(state) for name, state in callbacks.items()}
        states |= {f"run.stateful {name}": entry.state_dict() for name, entry in run.stateful.items()}
        if hasattr(run.lr_scheduler, "state_dict"):
            states["the schedule"] = run.lr_scheduler.state_dict()
        return {owner: flatten_state(state) for owner, state in states.items()}

    def _attributes(self, run: Run) -> dict[str, str]:
        """Return plain attributes of the user's own objects, which may explain a difference."""
        owners: dict[str, Any] = {"the script": sys.modules["__main__"]}
        dataset, name = run.train_dataset, "train_dataset"
        for _ in range(3):  # a Subset of a Subset, and the like
            owners[name] = dataset
            dataset, name = getattr(dataset, "dataset", None), f"{name}.dataset"
        owners |= {
            "data_collator": getattr(self.trainer.collate, "collate", self.trainer.collate),
            "compute_loss": self.trainer.compute_loss,
        }
        for place, module in run.model.named_modules():
            owners[f"model.{place}" if place else "model"] = module
        for callback in self.trainer.events.callbacks:
            owners[f"callback {type(callback).__name__}"] = callback
        owners |= {f"run.stateful {name}": entry for name, entry in run.stateful.items()}
        return {
            f"{owner}: {name}": mark
            for owner, thing in owners.items()
            if not _is_a_library_s(thing)
            for name, mark in attributes(thing).items()
        }

    def _dump(self, live: Mapping[str, Mapping[str, Any]], step: int, name: str) -> None:
        """Write the values of one tensor, to quantify its difference."""
        part, _, rest = name.partition(".")
        value = live.get(part, {}).get(rest)
        if isinstance(value, torch.Tensor):
            held = parts_of(value)[0].detach().cpu()
            save_file({f"{step} {name}": held.contiguous().clone()}, self.file.with_suffix(".safetensors"))

    def _write(self, entry: Mapping[str, Any], mode: str) -> None:
        with open(self.file, mode, encoding="utf-8") as file:  # closed after each write: this process may be killed
            file.write(json.dumps(entry) + "\n")


class _First(Callback):
    """Callback that runs before all others."""

    priority = -(10**6)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, run: Run) -> None:
        self.recorder.begin(run)

    def on_step_begin(self, run: Run) -> None:
        self.recorder.between_steps(run)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self.recorder.between_steps(run)


class _Last(Callback):
    """Callback that runs after all others, and sees their effects."""

    priority = 10**6

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_step_begin(self, run: Run) -> None:
        self.recorder.at("on_step_begin", run)

    def on_pre_optimizer_step(self, run: Run) -> None:
        self.recorder.at("on_pre_optimizer_step", run)

    def on_optimizer_step(self, run: Run) -> None:
        assert run.optimizer is not None
        self.recorder.note("hyperparameters", marks(_groups(run.optimizer)))
        self.recorder.at("on_optimizer_step", run)

    def on_step_end(self, run: Run) -> None:
        self.recorder.end_step(run)
        self.recorder.at("on_step_end", run)

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.recorder.note("figures", marks(_losses(record), "logged"))

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.recorder.note("figures", marks(_losses(metrics), "evaluated"))


assert all(moment in vars(_Last) for moment in MOMENTS)


def _losses(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that do not depend on durations."""
    kept = {name: value for name, value in record.items() if name in ("loss", "grad_norm") or name.endswith("_loss")}
    kept.pop("train_loss", None)  # the final record's, whose step may vary
    return kept


def _without_clock(state: dict[str, Any]) -> dict[str, Any]:
    """Return a callback's state; for `from_transformers` without speeds, memory and the run's folder."""
    if not {"log_history", "best_model_checkpoint"} <= state.keys():
        return state
    records = [losses for record in state["log_history"] if (losses := _losses(record))]
    return {**state, "log_history": records, "best_model_checkpoint": None}


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of each parameter group, by the names that users see."""
    groups = ({name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups)
    return {f"group {number}": group for number, group in enumerate(groups)}


def _optimizer_state(run: Run) -> dict[str, Any]:
    assert run.optimizer is not None
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    states = enumerate(run.optimizer.state.items())
    state = {names.get(id(parameter), f"parameter {number}"): entry for number, (parameter, entry) in states}
    return dict(leaves({**_groups(run.optimizer), **state}))


def _number(value: torch.Tensor) -> str:
    """Return the value and the bits of a scalar."""
    number = float(value)
    return f"{number!r} {number.hex()}"


def _is_a_library_s(thing: Any) -> bool:
    """Return whether an object is None or belongs to torch or trainer_kit."""
    return type(thing).__module__.split(".")[0] in ("torch", "trainer_kit") or thing is None

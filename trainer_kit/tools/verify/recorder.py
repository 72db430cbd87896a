"""`Recorder`: writes down everything that two starts of a run must have in common, a line a step."""

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
from trainer_kit.tools.verify.fingerprints import attributes, leaves, marks, sample_marks, state_marks
from trainer_kit.tools.verify.kill_plan import MOMENTS, Kill, checkpoint_step
from trainer_kit.trainer import Trainer
from trainer_kit.utils.pytree import flatten_state


@dataclasses.dataclass(frozen=True)
class RecordedStart:
    """One start of the script, and what is wanted of it.

    Attributes:
        name: Of the files that it writes.
        folder: Where it writes them.
        output_dir: Of the run, in `folder`.
        steps: It stops after this one.
        seed: What the checkpoint's step is chosen by, where `save_at` does not say it.
        chance: Seeds the generators before the script begins, which would otherwise be left to chance.
        save_at: The step of the checkpoint.
        resume: Whether it goes on from there.
        against: Name of the start to compare with; it stops after the first step that differs.
        kill: Where it kills itself.
        dump: Step and name of a tensor to write to a file.
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
        """As an argument of a command."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> RecordedStart:
        """What `dumps` made."""
        values = json.loads(text)
        kill, dump = values.pop("kill"), values.pop("dump")
        return cls(**values, kill=kill and Kill(**kill), dump=dump and (dump[0], dump[1]))


class Recorder:
    """Watches a training through two callbacks, one before all others and one after them.

    A step's line is written when the next one begins, or training ends: by then all has happened that belongs to it,
    evaluation and checkpoint included. The first line is the state that the first step begins with.

    Args:
        trainer: It is about to train.
        start: What is wanted.
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
        self._step: dict[str, dict[str, str]] = {}  # what the step under way has shown so far
        self._fetched: deque[tuple[MicroBatch, dict[str, str], list[str]]] = deque()
        self._has_begun = False

    def watch_batches(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """Takes notes of micro-batches on their way to the loop, which fetches one ahead."""
        for micro in micro_batches:
            if isinstance(micro, MicroBatch):
                self._fetched.append((micro, marks(micro.batch), sample_marks(micro.batch)))
            yield micro

    def begin(self, run: Run) -> None:
        """Settles what depends on the length of the training, and writes it down."""
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
        """Writes the line of the step that is over."""
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
        """Adds to what the step under way has shown."""
        self._step.setdefault(part, {}).update(found)

    def end_step(self, run: Run) -> None:
        """What follows a step: the checkpoint, the end."""
        assert run.local_loss is not None
        self.note("loss", {"": _number(run.local_loss)})
        if run.last_norms is not None:
            self.note("gradients", {"norm": _number(run.last_norms.total)})
        if run.state.step == self.save_at:
            run.requests.save = True
        if run.state.step >= self.last_step or self.is_different:
            run.requests.stop = True

    def at(self, moment: str, run: Run) -> None:
        """Kills this process where that is planned."""
        kill = self.start.kill
        step = run.state.step + (moment != "on_step_end")  # in most moments it is not yet counted
        if kill is not None and (kill.step, kill.moment, kill.rank) == (step, moment, run.strategy.rank):
            Path(self.start.folder, f"{self.start.name}.killed").touch()
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def _add_batches(self, line: Line, live: dict[str, dict[str, Any]]) -> None:
        """The micro-batches of the step that is over; one of the next step may be there already."""
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
        """The tensors and numbers that a resumed run must have again, by part and name."""
        saved = run.model.state_dict().keys()
        tensors = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}
        return {
            "model": {name: tensor for name, tensor in tensors.items() if name in saved},
            "unsaved": {name: tensor for name, tensor in tensors.items() if name not in saved},
            "optimizer": _optimizer_state(run),
        }

    def _states(self, run: Run) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
        """The states that a resumed run must have again, by their owners, as a checkpoint holds them."""
        callbacks = self.trainer.events.state_dict()
        states = {f"callback {name}": _without_clock(state) for name, state in callbacks.items()}
        states |= {f"run.stateful {name}": entry.state_dict() for name, entry in run.stateful.items()}
        if hasattr(run.lr_scheduler, "state_dict"):
            states["the schedule"] = run.lr_scheduler.state_dict()
        return {owner: flatten_state(state) for owner, state in states.items()}

    def _attributes(self, run: Run) -> dict[str, str]:
        """What may explain a difference: plain attributes of the user's own objects."""
        owners: dict[str, Any] = {"the script": sys.modules["__main__"]}
        dataset, name = run.train_dataset, "train_dataset"
        for _ in range(3):  # a Subset of a Subset, and the like
            owners[name] = dataset
            dataset, name = getattr(dataset, "dataset", None), f"{name}.dataset"
        owners |= {"data_collator": self.trainer.collate, "compute_loss": self.trainer.compute_loss}
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
        """Writes the values of one tensor, so that it can be said how much it differs."""
        part, _, rest = name.partition(".")
        value = live.get(part, {}).get(rest)
        if isinstance(value, torch.Tensor):
            save_file(
                {f"{step} {name}": value.detach().cpu().contiguous().clone()}, self.file.with_suffix(".safetensors")
            )

    def _write(self, entry: Mapping[str, Any], mode: str) -> None:
        with open(self.file, mode, encoding="utf-8") as file:  # closed each time: this process may be killed
            file.write(json.dumps(entry) + "\n")


class _First(Callback):
    """Hears of everything before the other callbacks do."""

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
    """Hears of everything after the other callbacks, and sees what they did."""

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
    """What in a record of a step does not depend on how long something took."""
    kept = {name: value for name, value in record.items() if name in ("loss", "grad_norm") or name.endswith("_loss")}
    kept.pop("train_loss", None)  # of the record at the end, wherever that is
    return kept


def _without_clock(state: dict[str, Any]) -> dict[str, Any]:
    """A callback's state; of what `from_transformers` keeps, without speeds, memory and the run's folder."""
    if not {"log_history", "best_model_checkpoint"} <= state.keys():
        return state
    records = [losses for record in state["log_history"] if (losses := _losses(record))]
    return {**state, "log_history": records, "best_model_checkpoint": None}


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The settings of each group of parameters, by the names that users see."""
    groups = ({name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups)
    return {f"group {number}": group for number, group in enumerate(groups)}


def _optimizer_state(run: Run) -> dict[str, Any]:
    assert run.optimizer is not None
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    states = enumerate(run.optimizer.state.items())
    state = {names.get(id(parameter), f"parameter {number}"): entry for number, (parameter, entry) in states}
    return dict(leaves({**_groups(run.optimizer), **state}))


def _number(value: torch.Tensor) -> str:
    """Of a scalar: its value and its bits."""
    number = float(value)
    return f"{number!r} {number.hex()}"


def _is_a_library_s(thing: Any) -> bool:
    """Whether nothing of the user's is in it: torch's layers, our own callbacks."""
    return type(thing).__module__.split(".")[0] in ("torch", "trainer_kit") or thing is None

"""The moments of a training, which a process writes down as it passes them, and at one of which it can be made to die.

A moment in a save is found by watching what the writer itself asks of the system: each folder it makes, each write,
flush, rename and deletion. Beside these, "begins STEP" and "committed STEP" tell of a save.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scenarios import task
from torch.utils.data import get_worker_info

from trainer_kit import Callback, Run
from trainer_kit.callbacks import jsonl
from trainer_kit.checkpoint import async_saver, manager
from trainer_kit.checkpoint.format.manifest import REPLACED_PREFIX, STAGING_PREFIX
from trainer_kit.checkpoint.save import Save
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.loop.train_step import TrainStep

ON_ANY_RANK = ("training", "evaluation", "fetching", "a data worker", "a snapshot", "leaving", "reading a checkpoint")
KINDS = ("the weights", "a state", "the manifest", "the arguments")
IN_A_SAVE = (
    "copying the rest", "making a folder",
    *(f"{verb} {kind}" for kind in KINDS for verb in ("writing", "flushing", "renaming")),
    "flushing a staged folder", "committing", "flushing the commit",
    "hiding an old one", "flushing the hiding", "deleting an old one", "after the save",
)  # fmt: skip
IN_A_REPLACEMENT = ("moving the replaced aside", "committing a replacement", "deleting the replaced")
ON_ANOTHER_RANK = ("writing another part",)
ON_THE_MAIN_RANK = ("a line of the log", "clearing the folder", *IN_A_SAVE, *IN_A_REPLACEMENT)


class Death(NamedTuple):
    """When a process dies.

    Attributes:
        moments: Any of these, which are among the above.
        count: At which one of them.
        told_first: Of the moments "training" after which it gets SIGTERM; the count begins there. 0 for none.
    """

    moments: tuple[str, ...]
    count: int
    told_first: int = 0


class Watch(Callback):
    """Writes down the moments of this process, and ends it at one of them by SIGKILL.

    Args:
        journal: File to which moments are appended, one a line: "STEP MOMENT".
        death: None lets it live.
    """

    priority = 1000

    def __init__(self, journal: Path, death: Death | None) -> None:
        self.journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.death = death
        self.left = death.count if death else 0
        self.told_first = death.told_first if death else 0
        self.step = 0
        self._write = os.write

    def note(self, text: str) -> None:
        self._write(self.journal, f"{self.step} {text}\n".encode())

    def passes(self, moment: str, last_words: Callable[[], object] = lambda: None) -> None:
        """Notes a moment, or dies there: `last_words` is what it still does."""
        self.note(moment)
        if self.told_first:
            self.told_first -= moment == "training"
            if not self.told_first:
                signal.raise_signal(signal.SIGTERM)
        elif self.death and moment in self.death.moments:
            self.left -= 1
            if self.left == 0:
                last_words()
                self.note("killed")
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    # The training's own events

    def on_train_begin(self, run: Run) -> None:
        self.step = run.state.step
        self.note("starts")

    def on_epoch_begin(self, run: Run) -> None:
        self.passes("training")

    def on_step_begin(self, run: Run) -> None:
        self.passes("training")

    def on_substep_end(self, run: Run) -> None:
        self.passes("training")

    def on_pre_optimizer_step(self, run: Run) -> None:
        self.passes("training")

    def on_optimizer_step(self, run: Run) -> None:
        self.passes("training")

    def on_step_end(self, run: Run) -> None:
        self.step = run.state.step
        self.passes("training")

    def on_evaluate_begin(self, run: Run) -> None:
        self.passes("evaluation")

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.passes("evaluation")

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self.passes("leaving")

    def on_exit(self, run: Run) -> None:
        self.passes("leaving")

    # What it does not tell

    def install(self) -> None:
        """Watches the library of this process from now on."""
        passes = self.passes
        _before(manager, "read_state", lambda *_, **__: passes("reading a checkpoint"))
        _before(manager, "load_weights", lambda *_, **__: passes("reading a checkpoint"))
        _before(TrainStep, "_fetch", lambda *_, **__: passes("fetching"))
        _before(
            async_saver.AsyncSaver, "begin", lambda *_, **__: (self.note(f"begins {self.step}"), passes("a snapshot"))
        )
        _before(HostStaging, "take", lambda *_, **__: passes("a snapshot"))
        _before(HostStaging, "complete", lambda *_, **__: passes("copying the rest"))
        _before(async_saver, "take_snapshot", lambda *_, **__: passes("a snapshot"))
        _before(jsonl, "append_record", self._log_record)
        _Calls(self).install()

    def _log_record(self, path: Path, *record: Any) -> None:
        self.passes("a line of the log", lambda: _write_half(path, json.dumps(record, default=str).encode()))


def _write_half(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(line[: len(line) // 2])


class Read(task.Noisy):
    """The task's dataset, of which a data worker dies, or the main process in an evaluation."""

    def __init__(self, watch: Watch, samples: int, moment: str) -> None:
        super().__init__(samples)
        self.watch, self.moment = watch, moment

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if get_worker_info() is not None:
            self.watch.passes("a data worker")
        else:
            self.watch.passes(self.moment)
        return super().__getitem__(index)


class _DiesAsRead:
    """Before a stream's class: the stream dies as it is read."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for sample in super().__iter__():  # type: ignore[misc]
            self.watch.passes("fetching")
            yield sample


class ReadStream(_DiesAsRead, task.Stream):
    """The task's stream, with its state."""


class ReadStateless(_DiesAsRead, task.StatelessStream):
    """The one without a state."""


class _Calls:
    """Names the system calls of a save, and those that clear the folder at a start."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.work = threading.local()  # .name: what this thread is at
        self.open: dict[int, Path] = {}  # files and folders by their descriptor

    def install(self) -> None:
        self._during(async_saver, "open_staging", "open")
        self._during(Save, "commit", "write")
        self._during(Save, "send_part", "part")
        self._during(async_saver, "prune", "prune")
        self._during(manager.CheckpointManager, "_take_folder", "clear")
        for module_call in ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir"):
            _before(os, module_call, getattr(self, f"_{module_call}"), when=self._is_at_work)
        original = os.open

        def opened(path: Any, *args: Any, **kwargs: Any) -> int:
            descriptor = original(path, *args, **kwargs)
            if self._is_at_work():
                self.open[descriptor] = Path(os.fsdecode(path))
            return descriptor

        os.open = opened

    def _during(self, owner: Any, name: str, work: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.work.name = work
            try:
                result = original(*args, **kwargs)
            finally:
                self.work.name = None
            if work == "write":
                self.watch.note(f"committed {result.name.rpartition('-')[2]}")
            elif work == "prune":
                self.watch.passes("after the save")
            return result

        setattr(owner, name, watched)

    def _is_at_work(self) -> bool:
        return getattr(self.work, "name", None) is not None

    def _passes(self, moment: str, last_words: Callable[[], object] = lambda: None) -> None:
        names = {"clear": "clearing the folder", "part": "writing another part"}
        self.watch.passes(names.get(self.work.name, moment), last_words)

    def _mkdir(self, path: Any, *_: Any, **__: Any) -> None:
        self._passes("making a folder")

    def _write(self, descriptor: int, content: memoryview) -> None:
        half = content[: len(content) // 2]
        self._passes(f"writing {_kind(self.open.get(descriptor, Path()))}", lambda: self.watch._write(descriptor, half))

    def _fsync(self, descriptor: int) -> None:
        path = self.open.get(descriptor, Path())
        if not path.is_dir():
            self._passes(f"flushing {_kind(path)}")
        elif any(part.startswith(STAGING_PREFIX) for part in path.parts):
            self._passes("flushing a staged folder")
        else:
            self._passes("flushing the commit" if self.work.name == "write" else "flushing the hiding")

    def _rename(self, source: Any, target: Any, **_: Any) -> None:
        source, target = Path(source), Path(target)
        if self.work.name == "prune":
            self._passes("hiding an old one")
        elif target.name.startswith(REPLACED_PREFIX):
            self._passes("moving the replaced aside")
        else:
            replaces = target.with_name(f"{REPLACED_PREFIX}{target.name}").exists()
            self._passes("committing a replacement" if replaces else "committing")

    def _replace(self, source: Any, target: Any, **_: Any) -> None:
        self._passes(f"renaming {_kind(Path(target))}")

    def _unlink(self, path: Any, **_: Any) -> None:
        self._passes("deleting an old one" if self.work.name == "prune" else "deleting the replaced")

    _rmdir = _unlink


def _kind(path: Path) -> str:
    name = path.name.removeprefix(".").removesuffix(".tmp")
    if path.parent.name == "state":
        return "a state"
    return {"manifest.json": "the manifest", "arguments.json": "the arguments"}.get(name, "the weights")


def _before(owner: Any, name: str, does: Callable[..., object], when: Callable[[], bool] = lambda: True) -> None:
    """Lets a function of a module or a class do something else first."""
    original = getattr(owner, name)

    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if when():
            does(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, watched)


class Journal(NamedTuple):
    """What a process has written down.

    Attributes:
        moments: All, in order.
        step: The last step it had finished.
        start: The step at which it began to train; None where it did not come to that.
        begun: Steps of the saves that it began.
        committed: Steps of those that it knows to be committed.
    """

    moments: list[str]
    step: int
    start: int | None
    begun: list[int]
    committed: list[int]


def read_journal(path: Path) -> Journal:
    """The journal that a `Watch` wrote; empty where there is none."""
    lines = [line.partition(" ") for line in path.read_text().splitlines()] if path.exists() else []
    texts = [text for _, _, text in lines]
    starts = [int(step) for step, _, text in lines if text == "starts"]
    return Journal(
        texts, max((int(step) for step, _, _ in lines), default=0), starts[0] if starts else None,
        _numbers(texts, "begins "), _numbers(texts, "committed "),
    )  # fmt: skip


def _numbers(texts: Iterable[str], prefix: str) -> list[int]:
    return [int(text.removeprefix(prefix)) for text in texts if text.startswith(prefix)]

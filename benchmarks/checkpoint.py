"""Checkpoints: the stall of a save, bytes to the disk, loading, memory, and what a resume reads.

A model of 500 MB of weights with AdamW's state, 1.5 GB together, turn by turn in one process:

- the time that the loop stands still for a save during training, against a blocking `torch.save` of the same state,
  and the host memory beyond that of training;
- bytes a second to the disk, against one plain sequential write of the same tensors with fsync;
- verifying and loading all of it into a model and its optimizer, against `torch.load`, both from the system's cache;
- how many of 10 checkpoints in a folder a resume opens files of.

Medians over the turns. The training computes in one thread unless `--threads` says otherwise: a save writes in another
one, and slows training down where no core is left for it. Needs 6 GB of disk space in `--folder` and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.checkpoint import newest_valid, read_state, take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format.loading import load_weights

WIDTH = 1024
BYTES_A_LAYER = 4 * WIDTH * (WIDTH + 1)


class Points(Dataset[Any]):
    """Points that are all the same, as many as anybody asks for."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(WIDTH)}


class Net(torch.nn.Module):
    """Linear layers one after the other; returns its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Those of a quiet run on the CPU."""
    values: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "log_level": "error", "logging_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**values | changes)


def state_of(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """What both ways of saving save."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list):
        for each in state.values() if isinstance(state, dict) else state:
            yield from tensors_of(each)


def timed(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


# The stall and the memory


class Stall(Callback):
    """Measures how long the loop stands still for saves, how long steps take, and what a `torch.save` takes.

    Attributes:
        stood: Seconds that the loop stood still from the end of a step to the end of the next, by that.
        took: Seconds of each step, from the end of the one before, without `torch.save`.
        blocking: Seconds of each `torch.save`, and of the same with fsync.
        memory: Bytes of this process before the first save, and the most since then.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every
        self.stood: dict[int, float] = {}
        self.took: dict[int, float] = {}
        self.blocking: list[tuple[float, float]] = []
        self.memory = [0, 0]
        self._end = self._stood = 0.0
        self._ended = threading.Event()

    def on_step_end(self, run: Run) -> None:
        step = run.state.step
        if self._end:
            self.took[step] = time.perf_counter() - self._end
            self.stood[step] = run.ledger.seconds().get("saving", 0.0) - self._stood
        self._stood = run.ledger.seconds().get("saving", 0.0)
        if step == 1:  # after which the memory for copies is taken
            threading.Thread(target=self._watch, daemon=True).start()
        if step % self.every == self.every // 2 and step > self.every:
            self.memory, memory = [0, 0], self.memory  # what torch.save takes is not counted
            while any(Path(run.args.output_dir).glob(".staging-*")):  # the disk is its own
                time.sleep(0.01)
            os.sync()
            saved = timed(lambda: torch.save(state_of(run.model, run.optimizer), self.path))
            with open(self.path, "rb+") as file:
                flushed = timed(lambda: os.fsync(file.fileno()))
            self.blocking.append((saved, saved + flushed))
            self.path.unlink()
            self.memory = memory
        self._end = time.perf_counter()

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._ended.set()

    def _watch(self) -> None:
        process = psutil.Process()
        self.memory[0] = process.memory_info().rss
        while not self._ended.wait(0.01):
            self.memory[1] = max(self.memory[1], process.memory_info().rss)


def measure_stall(folder: Path, layers: int, turns: int, every: int = 8) -> None:
    """Prints by how much a save holds the loop up, and the memory that it takes."""
    stall = Stall(folder / "blocking.pt", every)
    args = arguments(folder / "run", max_steps=every * (turns + 1), save_steps=every, save_total_limit=1)
    trainer = Trainer(Net(layers), args, Points(), callbacks=[stall])
    trainer.train()
    blocking, flushed = (statistics.median(column) for column in zip(*stall.blocking, strict=True))
    print(f"blocking torch.save      {blocking:7.3f} s       with fsync {flushed:.3f} s")
    saves = range(every + 1, every * (turns + 1), every)  # the steps in which a copy is made
    quiet = statistics.median(seconds for step, seconds in stall.took.items() if step % every == 0)
    figures = {
        "first save: stood still": stall.stood[saves[0]],
        "later saves: stood still": statistics.median(stall.stood[step] for step in saves[1:]),
        "and that step was longer by": statistics.median(stall.took[step] - quiet for step in saves[1:]),
    }
    for name, seconds in figures.items():
        print(f"{name:28} {seconds:7.3f} s    ratio {seconds / blocking:.3f}, with fsync {seconds / flushed:.3f}")
    print(f"a step without a save        {quiet:7.3f} s")
    size = 3 * layers * BYTES_A_LAYER
    print(f"memory beyond training   {(stall.memory[1] - stall.memory[0]) / size:7.3f} of the state")


# To the disk and back


def trained(layers: int) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    model = Net(layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def write_plainly(path: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Writes the tensors one after the other and flushes them to the disk."""
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
            while content:
                content = content[file.write(content) :]
        os.fsync(file.fileno())


def measure_disk(folder: Path, layers: int, turns: int) -> None:
    """Prints bytes a second to the disk, and seconds to load them."""
    model, optimizer = trained(layers)
    state = state_of(model, optimizer)
    snapshot = take_snapshot(1, state["model"], {"optimizer": state["optimizer"]}, arguments={})
    theirs, plain = folder / "theirs.pt", folder / "plain.bin"
    rows = []
    for _ in range(turns):
        os.sync()
        plainly = timed(lambda: write_plainly(plain, tensors_of(state)))
        plain.unlink()
        os.sync()
        rows.append((plainly, timed(lambda: write_checkpoint(folder, snapshot))))
    plainly, ours = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"plain write and fsync    {snapshot.nbytes / plainly / 1e9:7.3f} GB/s")
    print(f"write_checkpoint         {snapshot.nbytes / ours / 1e9:7.3f} GB/s   ratio {plainly / ours:.3f}")

    torch.save(state, theirs)
    measure_loading(folder, theirs, model, optimizer, turns)


def measure_loading(
    folder: Path, theirs: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, turns: int
) -> None:
    """Prints seconds to load what lies in the folder, and in `torch.save`'s file."""

    def load() -> None:
        found = newest_valid(folder, print)
        assert found is not None
        load_weights(model, found, is_verified=True)  # as a resume does
        optimizer.load_state_dict(read_state(found, "optimizer") or {})

    def load_theirs() -> None:
        state = torch.load(theirs, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    for function in (load, load_theirs):
        function()  # what they read is in the system's cache then
    rows = [(timed(load_theirs), timed(load)) for _ in range(turns)]
    torch_load, ours = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"torch.load               {torch_load:7.3f} s")
    print(f"verify and load          {ours:7.3f} s   ratio {ours / torch_load:.3f}")


# Resuming


def measure_resume(folder: Path) -> None:
    """Prints of how many checkpoints a resume opens files, where there are 10."""
    opened: set[str] = set()

    def audit(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(details[0], str | os.PathLike):
            path = Path(details[0])
            opened.update(part for part in path.parts if part.startswith("checkpoint-") and not path.is_dir())

    Trainer(Net(1), arguments(folder, max_steps=10, save_steps=1), Points()).train()
    found = sorted(path.name for path in folder.glob("checkpoint-*"))
    trainer = Trainer(Net(1), arguments(folder, max_steps=10, save_steps=100), Points())
    sys.addaudithook(audit)
    trainer.train(resume_from_checkpoint=True)
    print(f"files opened at a resume with {len(found)} checkpoints: only those of {', '.join(sorted(opened))}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the folder for temporary files")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the weights (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layers = max(1, options.megabytes * 10**6 // BYTES_A_LAYER)
    for measure in (measure_disk, measure_stall):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(Path(folder), layers, options.turns)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure_resume(Path(folder))


if __name__ == "__main__":
    main()

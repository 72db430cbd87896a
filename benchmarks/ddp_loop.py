"""Several processes: the Trainer against a plain DistributedDataParallel loop, on gloo or nccl.

`python benchmarks/ddp_loop.py` starts two processes with torchrun that train the same transformer both ways in turn:
AdamW with a linear schedule, clipping to 1.0, a log every 50 steps. It prints the time of a step, the ratio of the
throughputs, and the collectives of a step other than the gradients' own.

`python benchmarks/ddp_loop.py --start` measures from the command to the end of the first step: `torchrun` with the
plain loop against `trainer-kit launch` with the Trainer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from trainer_kit import Callback, Run, Trainer, TrainingArguments

BATCH, LENGTH = 8, 64


class Texts(Dataset[Any]):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        self.ids = torch.randint(0, 512, (length, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.ids[index], "labels": self.ids[index]}


class Net(torch.nn.Module):
    """A small transformer; returns its loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embedding(x)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def device() -> torch.device:
    """The GPU of this process, else the CPU."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def plain(dataset: Texts, steps: int, shape: tuple[int, int]) -> float:
    """Seconds a step of a loop as one would write it by hand."""
    place = device()
    model = DistributedDataParallel(Net(*shape).to(place), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    step, begin, loss = 0, 0.0, torch.zeros(())
    while step < steps:
        for batch in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
            loss = model(**{name: value.to(place) for name, value in batch.items()})["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step == WARM_UP:
                loss.item()
                begin = time.perf_counter()
            if step % 50 == 0:
                loss.item()
            if step == steps:
                break
    loss.item()
    return (time.perf_counter() - begin) / (steps - WARM_UP)


WARM_UP = 5
"""Steps that are not measured: the first makes the buckets."""


class Clock(Callback):
    """Times the steps, and counts the collectives of one that does not log."""

    priority = 1000

    def __init__(self) -> None:
        self.begin = self.end = 0.0
        self.collectives: list[str] = []

    # Not on_step_end: with a callback that listens to it, processes wait for one another after each step.
    def on_step_begin(self, run: Run) -> None:
        if run.state.step == WARM_UP:
            self.begin = time.perf_counter()
            self._watch()
        if run.state.step == WARM_UP + 1:
            self._unwatch()
        if run.state.step == run.total_steps - 1:  # the plain loop ends here too
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.end = time.perf_counter()

    def _watch(self) -> None:
        self.originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "barrier")}
        for name, original in self.originals.items():

            def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                self.collectives.append(name)
                return original(*args, **kwargs)

            setattr(dist, name, counted)

    def _unwatch(self) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


class Listener(Callback):
    """Listens to the end of each step, where it might make a request."""

    def on_step_end(self, run: Run) -> None:
        pass


def trainer(
    dataset: Texts, steps: int, shape: tuple[int, int], callbacks: Sequence[Callback] = ()
) -> tuple[float, list[str]]:
    """Seconds a step of the Trainer with its defaults, progress bar off, and a step's collectives."""
    clock, folder = Clock(), os.environ["BENCHMARK_FOLDER"]
    args = TrainingArguments(
        output_dir=folder, max_steps=steps + 1, learning_rate=1e-3, logging_steps=50, disable_tqdm=True,
        save_strategy="no", log_level="error", per_device_train_batch_size=BATCH,
    )  # fmt: skip
    Trainer(Net(*shape), args, dataset, callbacks=[clock, *callbacks]).train()
    return (clock.end - clock.begin) / (steps - WARM_UP), clock.collectives


def compare(options: argparse.Namespace) -> None:
    """One process of the comparison; the first prints."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    torch.set_num_threads(1)
    dataset, shape, rows = Texts(4000), (options.width, options.layers), []
    collectives: list[str] = []
    for turn in range(options.turns + 1):
        plain_seconds = plain(dataset, options.steps, shape)
        ours, collectives = trainer(dataset, options.steps, shape)
        listened, _ = trainer(dataset, options.steps, shape, [Listener()])
        if turn:  # the first warms up
            rows.append((plain_seconds, ours, listened))
    if dist.get_rank() == 0:
        names = ("plain DistributedDataParallel", "Trainer", "Trainer, own on_step_end")
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            ratios = sorted(row[0] / seconds for row, seconds in zip(rows, column, strict=True))
            spread = f"{statistics.median(ratios):8.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})"
            print(f"{name:<30} {statistics.median(column) * 1e3:8.2f} ms a step, throughput to the first {spread}")
        print(f"other collectives of a step    {', '.join(collectives) or 'none'}")
    dist.destroy_process_group()


class FirstStep(Callback):
    """Says when the first step ended."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 1 and run.strategy.is_main:
            print("first step", flush=True)


def first_step(kind: str, shape: tuple[int, int]) -> None:
    """What is started: the first step of either way."""
    dataset = Texts(400)
    if kind == "trainer":
        args = TrainingArguments(
            output_dir=os.environ["BENCHMARK_FOLDER"], max_steps=1, disable_tqdm=True, save_strategy="no",
            report_to="none", log_level="error",
        )  # fmt: skip
        Trainer(Net(*shape), args, dataset, callbacks=[FirstStep()]).train()
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = DistributedDataParallel(Net(*shape).to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = next(iter(DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))))
    model(**{name: value.to(device()) for name, value in batch.items()})["loss"].backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("first step", flush=True)
    dist.destroy_process_group()


def start(options: argparse.Namespace) -> None:
    """Times both commands in turn."""
    here, count = os.path.abspath(__file__), str(options.processes)
    shape = ["--width", str(options.width), "--layers", str(options.layers)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    launch = [sys.executable, "-m", "trainer_kit", "launch", "--num-processes", count]
    rows = []
    for turn in range(options.turns + 1):
        seconds = [
            _until_first_step([*command, here, "--first-step", kind, *shape])
            for command, kind in ((torchrun, "plain"), (launch, "trainer"))
        ]
        if turn:
            rows.append(seconds)
    plain_seconds, ours = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"torchrun, plain loop           {plain_seconds:8.2f} s to the first step")
    print(f"trainer-kit launch, Trainer    {ours:8.2f} s to the first step")
    print(f"ratio                          {statistics.median(row[1] / row[0] for row in rows):8.3f}")


def _until_first_step(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"BENCHMARK_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().endswith("first step"):
                seconds = time.perf_counter() - begin
                process.communicate(timeout=120)
                return seconds
        raise RuntimeError(process.communicate()[1])


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--start", action="store_true", help="measure the start instead of the steps")
    parser.add_argument("--first-step", choices=["plain", "trainer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_step:
        first_step(options.first_step, (options.width, options.layers))
    elif options.start:
        start(options)
    elif "RANK" in os.environ:
        compare(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"BENCHMARK_FOLDER": folder, "OMP_NUM_THREADS": "1"}
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
            subprocess.run([sys.executable, "-m", *torchrun, *sys.argv], env=environment, check=True, timeout=3600)


if __name__ == "__main__":
    main()

"""What a step costs as the work grows: callbacks, samples of the dataset, processes.

- Callbacks: calls and time of a step with 1, 10 and 100 callbacks that listen to nothing, or to the end of a step.
- Samples: time to the first batch and peak memory for a dataset of 10^3 to 10^8 samples, from the beginning and in the
  middle of an epoch, each in a process of its own, against a shuffling DataLoader of torch.
- Processes: time of the one exchange of a step between the hosts of 1, 2 and 4 processes on this machine, after a step
  and begun within it.
- Ranks: the same exchange for 8 to 4,096 ranks, simulated from the latency and the bandwidth of a network.

`python benchmarks/scaling.py` writes its part of docs/en/explanation/performance.md, and takes about three minutes.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import math
import os
import pstats
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from loop import Net, Points
from page import machine, peak_memory, replace_part, spread, table
from torch.utils.data import DataLoader, Dataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.data.collate import stack
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
from trainer_kit.data.sampling import Layout
from trainer_kit.loop.training_loop import TrainingLoop
from trainer_kit.strategies.vote import TREE_PROCESSES, parents

COUNTS = (0, 1, 10, 100)
LENGTHS = tuple(10**power for power in range(3, 9))
PROCESSES = (1, 2, 4)
RANKS = tuple(2**power for power in range(3, 13))
MACHINE = 8
"""Ranks on each of the simulated machines."""

NUMBERS = 15
"""Integers that a rank gives to a vote: 6 requests, whether any is scheduled, 4 of the position, 4 counts."""


class Silent(Callback):
    """Listens to nothing."""


class Listening(Callback):
    """Listens to the end of each step."""

    def on_step_end(self, run: Run) -> None:
        pass


def train_with(callbacks: list[Callback], steps: int, profile: cProfile.Profile | None = None) -> float:
    """Train the MLP of `loop.py` and return the seconds of a step, those of setting up left out."""
    seconds, take_steps = 0.0, TrainingLoop.take_steps

    def timed(loop: TrainingLoop) -> None:
        nonlocal seconds
        begin = time.perf_counter()
        if profile is not None:
            profile.enable()
        take_steps(loop)
        if profile is not None:
            profile.disable()
        seconds = time.perf_counter() - begin

    with mock.patch.object(TrainingLoop, "take_steps", timed):
        _train(Points(8000), steps, callbacks)
    return seconds / steps


def _train(dataset: Dataset[Any], steps: int, callbacks: Sequence[Callback] = ()) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _train_in(folder, dataset, steps, callbacks)


def _train_in(folder: str, dataset: Dataset[Any], steps: int, callbacks: Sequence[Callback]) -> None:
    args = TrainingArguments(
        folder, max_steps=steps, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, log_level="error",
    )  # fmt: skip
    Trainer(Net(), args, dataset, callbacks=[*callbacks]).train()


def _made(kind: type[Callback], count: int) -> list[Callback]:
    return [kind() for _ in range(count)]


def calls_with(kind: type[Callback], count: int) -> float:
    """Return the calls of functions in a step, without those of the first ones."""
    totals = []
    train_with([], 10)  # what is made once in a process
    for steps in (100, 200):
        profile = cProfile.Profile()
        train_with(_made(kind, count), steps, profile)
        totals.append(sum(values[1] for values in pstats.Stats(profile).stats.values()))  # type: ignore[attr-defined]
    return (totals[1] - totals[0]) / 100


def measure_callbacks(steps: int, rounds: int) -> str:
    """Return the table of callbacks."""
    kinds: list[tuple[type[Callback], int]] = [
        (Silent, 0),
        *((kind, count) for kind in (Silent, Listening) for count in COUNTS[1:]),
    ]
    train_with([], steps)  # warms up
    times = []
    for turn in range(rounds):
        order = [(turn + place) % len(kinds) for place in range(len(kinds))]  # each comes first in its turn
        seconds = {number: train_with(_made(*kinds[number]), steps) for number in order}
        times.append([seconds[number] for number in range(len(kinds))])
    rows = []
    for number, (kind, count) in enumerate(kinds):
        ratio = spread([row[number] / row[0] for row in times])
        name = f"{count} that listen to {'nothing' if kind is Silent else 'the end of a step'}" if count else "none"
        rows.append([name, f"{calls_with(kind, count):.0f}", ratio.text()])
    return table(["callbacks besides the defaults", "calls in a step", "time of a step, ratio to none"], rows)


class Numbers(Dataset[Any]):
    """As many samples as asked for, which take no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(16), "labels": torch.tensor(index % 2)}


def first_batch(kind: str, length: int) -> dict[str, float]:
    """Return the seconds to a first batch or step in this process, and the peak memory beyond what was in use."""
    before = peak_memory()
    begin = time.perf_counter()
    if kind == "DataLoader":
        next(iter(DataLoader(Numbers(length), batch_size=8, shuffle=True)))
    elif kind == "first":
        _train(Numbers(length), 1)
    else:
        loader = TrainLoader(Numbers(length), Layout(8), LoaderConfig(stack, seed=0))
        next(loader.micro_batches(epoch=0, position=length // 2, steps=1))
    return {"seconds": time.perf_counter() - begin, "bytes": peak_memory() - before}


def measure_samples(lengths: Sequence[int], rounds: int) -> str:
    """Return the table of dataset lengths; training is compared with its own smallest dataset."""
    kinds = ("first", "middle", "DataLoader")
    found: dict[tuple[str, int], list[dict[str, float]]] = {(kind, each): [] for each in lengths for kind in kinds}
    for _ in range(rounds):
        for kind, length in found:
            found[kind, length].append(json.loads(_child("--first-batch", kind, "--length", str(length))))

    def median(kind: str, length: int, key: str) -> float:
        return statistics.median(each[key] for each in found[kind, length])

    rows = []
    for length in lengths:
        seconds = [median(kind, length, "seconds") for kind in kinds]
        memory = [median(kind, length, "bytes") / 1e6 for kind in kinds]
        rows.append(
            [
                f"10^{round(math.log10(length))}",
                *(f"{each:.2f} s" for each in seconds),
                *(f"{each:.0f} MB" for each in memory),
            ]
        )
    titles = ("`Trainer.train`, 1 step", "first batch in mid-epoch", "`DataLoader(shuffle=True)`, first batch")
    return table(["samples", *titles, *(f"memory: {title}" for title in titles)], rows)


def _child(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    return done.stdout.splitlines()[-1]


class Exchange(Callback):
    """Times the exchange of a step between the hosts of all ranks, before the first step.

    It is timed alone, and as a vote that is read after the host has computed for some milliseconds.
    """

    def on_train_begin(self, run: Run) -> None:
        collectives = run.strategy.collectives
        vote, matrix, alone, ahead = collectives.make_vote(runs_ahead=True), torch.ones(256, 256), [], []
        for _ in range(600):
            begin = time.perf_counter()
            collectives.all_reduce_ints([1] * NUMBERS)
            alone.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            vote.begin([1] * NUMBERS)
            begun = time.perf_counter()
            for _ in range(4):
                matrix @ matrix
            computed = time.perf_counter()
            vote.wait_for_sums()
            ahead.append(time.perf_counter() - computed + begun - begin)
        vote.close()
        if collectives.is_main:
            print(json.dumps([statistics.median(times[100:]) for times in (alone, ahead)]), flush=True)


def measure_processes(rounds: int) -> str:
    """Return the table of processes on this machine."""
    found: dict[int, list[list[float]]] = {count: [] for count in PROCESSES}
    launch = [sys.executable, "-W", "ignore", "-m", "trainer_kit", "launch", "--num-processes"]
    for _ in range(rounds):
        for count, times in found.items():
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [*launch, str(count), __file__, "--exchange", folder], env=os.environ | {"OMP_NUM_THREADS": "1"},
                    capture_output=True, text=True, timeout=280,
                )  # fmt: skip
            printed = re.findall(r"\[\d[^\]]*\]$", done.stdout, re.MULTILINE)
            if done.returncode or not printed:
                raise RuntimeError(done.stdout + done.stderr)
            times.append([seconds * 1e6 for seconds in json.loads(printed[0])])
    rows = [
        [str(count), *(spread([*column]).text(0) for column in zip(*times, strict=True))]
        for count, times in found.items()
    ]
    return table(["processes on this machine", "exchange after a step, µs", "begun within the step, µs"], rows)


@dataclasses.dataclass(frozen=True)
class Network:
    """The delay of a message: latency, times a random factor, and its bytes by the bandwidth.

    Attributes:
        latency: Median seconds from a send to its receipt, the work of both hosts included.
        jitter: Standard deviation of the logarithm of the random factor.
        bandwidth: Bytes in a second.
        work: Seconds for which a process handles one of several messages that come or go at the same time.
    """

    latency: float
    jitter: float = 0.3
    bandwidth: float = 1.25e9
    work: float = 20e-6

    def delays(self, ranks: int, nbytes: float, random: np.random.Generator) -> np.ndarray:
        """Return the seconds of a message of each rank."""
        return self.latency * random.lognormal(0.0, self.jitter, ranks) + nbytes / self.bandwidth


def simulate_ring(ranks: int, nbytes: int, network: Network) -> float:
    """Return the seconds of gloo's all-gather: in n - 1 rounds, a rank passes on what it received in the one before.

    gloo sends each part in two halves, which follow each other without a wait.
    """
    random, done = np.random.default_rng(0), np.zeros(ranks)
    for _ in range(ranks - 1):
        arrived = np.roll(done + network.delays(ranks, nbytes, random), 1)
        done = np.maximum(done, arrived)
    return float(done.max())


def simulate_tree(ranks: int, nbytes: int, network: Network) -> float:
    """Return the seconds of `TreeVote`: sums go up to rank 0, and the total comes back."""
    random = np.random.default_rng(0)
    up, down = network.delays(ranks, nbytes, random), network.delays(ranks, nbytes, random)
    children: list[list[int]] = [[] for _ in range(ranks)]
    for rank, parent in enumerate(parents([rank // MACHINE for rank in range(ranks)])):
        if parent is not None:
            children[parent].append(rank)
    downward = [0]
    for rank in downward:
        downward += children[rank]
    done = np.zeros(ranks)
    for rank in reversed(downward):
        for arrival in sorted(done[child] + up[child] for child in children[rank]):
            done[rank] = max(done[rank], arrival) + network.work
    for rank in downward:
        for place, child in enumerate(children[rank], start=1):
            done[child] = done[rank] + place * network.work + down[child]
    return float(done.max())


def measure_ranks(networks: Sequence[Network]) -> str:
    """Return the table of simulated ranks."""
    nbytes, rows = 8 * NUMBERS, []
    for ranks in RANKS:
        seconds = [simulate(ranks, nbytes, each) for each in networks for simulate in (simulate_ring, simulate_tree)]
        rows.append([f"{ranks:,}", *(f"{each * 1e3:.2f} ms" for each in seconds)])
    first = networks[0]
    latencies = [f"{each.latency * 1e6:.0f} µs" for each in networks]
    head = [f"{kind}, latency {each}" for each in latencies for kind in ("ring (gloo's all-gather)", "tree")]
    return (
        f"{table(['ranks', *head], rows)}\n\n"
        f"Inputs: the latency of a message (median; lognormal with sigma {first.jitter}), bandwidth "
        f"{first.bandwidth * 8 / 1e9:.0f} Gbit/s, {nbytes} bytes from each rank, {MACHINE} ranks on a machine, "
        f"{first.work * 1e6:.0f} µs for each message of several at the same process. In short: the ring takes about "
        "(ranks - 1) latencies, the tree two for each of its levels. Fewer than "
        f"{TREE_PROCESSES} processes use the ring, all others the tree."
    )


def main() -> None:
    """Measures all, prints it, and writes it to the page; or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=1500, help="with callbacks, of each training (default: %(default)s)"
    )
    parser.add_argument("--largest", type=int, default=LENGTHS[-1], help="samples of the largest dataset")
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[50, 168], help="of a message, in µs (default: %(default)s)"
    )
    parser.add_argument("--bandwidth", type=float, default=10, help="of the network, in Gbit/s (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="only print")
    parser.add_argument("--first-batch", choices=["first", "middle", "DataLoader"], help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.first_batch:
        print(json.dumps(first_batch(options.first_batch, options.length)))
        return
    if options.exchange:
        _train_in(options.exchange, Numbers(64), 1, [Exchange()])
        return
    networks = [Network(latency=each * 1e-6, bandwidth=options.bandwidth * 1e9 / 8) for each in options.latency]
    lengths = [length for length in LENGTHS if length <= options.largest]
    parts = [
        "### Callbacks", measure_callbacks(options.steps, options.rounds),
        "### Samples", measure_samples(lengths, min(3, options.rounds)),
        "### Processes", measure_processes(min(3, options.rounds)), measure_ranks(networks),
    ]  # fmt: skip
    text = "\n\n".join([f"Machine: {machine(['torch', 'trainer_kit'], 1)}", *parts])
    print(text)
    if not options.dry_run:
        replace_part("scaling", text)


if __name__ == "__main__":
    main()

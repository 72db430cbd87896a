"""Cost of the figures: a step with the ledger, and with `Memory` and `Throughput` too, against one without them.

Turn by turn in one training: some steps with all, some with the ledger alone, some without (a ledger that does nothing
stands in), and so on. On an MLP 16-32-2 with batches of 8, whose step is about as short as one can be, and on a GPT-2
of two layers, 128 wide, with 8 texts of 64 tokens. Times are those of the processor, which other programs disturb less
than the clock's. Printed are medians over the turns, the cost of a record, which comes every 100 steps here, and how
the ledger's activities add up to the wall time. Use `--limit 0.01` to fail above one per cent.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from loop import Net, Points
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import Memory, Throughput
from trainer_kit.profiling.time_ledger import Ledger

RECORD = 100
KINDS = ("without", "ledger", "all")


class NoLedger(Ledger):
    """Does nothing."""

    def enter(self, activity: str) -> str:
        """Begins no activity."""
        return ""

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """A context in which nothing is measured."""
        yield


class Turns(Callback):
    """Takes ledger and callbacks away and gives them back, and notes the seconds of each step."""

    priority = -1000

    def __init__(self, length: int) -> None:
        self.length = length
        self.turns: list[list[float]] = []
        self.records: list[float] = []
        self.trainer: Trainer | None = None
        self._began = 0.0

    def on_train_begin(self, run: Run) -> None:
        assert self.trainer is not None
        everything = self.trainer.events._listeners
        few = {
            hook: [each for each in listeners if not isinstance(each[0], (Memory, Throughput))]
            for hook, listeners in everything.items()
        }
        self._ledgers = {"without": NoLedger(), "ledger": run.ledger, "all": run.ledger}
        self._listeners = {"without": few, "ledger": few, "all": everything}

    def on_step_begin(self, run: Run) -> None:
        seconds, step = time.thread_time() - self._began, run.state.step
        if self.turns:
            self.turns[-1].append(seconds)
        if step % self.length == 0:
            self._change(run, KINDS[len(self.turns) % len(KINDS)] if step else "all")
            if step:
                self.turns.append([])
        if step > RECORD and step % RECORD == 0:
            self._record(run)
        self._began = time.thread_time()

    def seconds(self, kind: str) -> list[float]:
        """Those of a step in each turn of this kind, after the first ones, in which Python adapts its code."""
        whole = self.turns[len(KINDS) : -1]
        return [statistics.median(turn[len(turn) // 4 :]) for turn in whole[KINDS.index(kind) :: len(KINDS)]]

    def _change(self, run: Run, kind: str) -> None:
        assert self.trainer is not None
        run.ledger, self.trainer.events._listeners = self._ledgers[kind], self._listeners[kind]

    def _record(self, run: Run) -> None:
        assert self.trainer is not None
        begin = time.thread_time()
        for callback in self.trainer.events.callbacks:
            if isinstance(callback, (Memory, Throughput)):
                callback.metrics(run)
        self.records.append(time.thread_time() - begin)


def gpt2() -> GPT2LMHeadModel:
    """About 0.6 million parameters."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def texts() -> list[dict[str, torch.Tensor]]:
    """Of random tokens."""
    rows = torch.randint(0, 500, (512, 64), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: str, steps: int) -> TrainingArguments:
    """Those of both trainings."""
    return TrainingArguments(
        output_dir=folder, max_steps=steps, disable_tqdm=True, use_cpu=True, save_strategy="no", report_to="none",
        log_level="warning", logging_strategy="no",
    )  # fmt: skip


def cost(model: torch.nn.Module, dataset: Any, steps: int, length: int) -> Turns:
    """Seconds of the steps in turns of this length."""
    turns = Turns(length)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
        turns.trainer = Trainer(model, arguments(folder, steps), dataset, callbacks=[turns])
        turns.trainer.train()
    return turns


def gap(model: torch.nn.Module, dataset: Any, steps: int) -> float:
    """By how much of the wall time the ledger's activities do not add up to it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(None):
        trainer = Trainer(model, arguments(folder, steps), dataset)
        begin = time.perf_counter()
        result = trainer.train()
        wall = time.perf_counter() - begin
    return abs(float(result.metrics["wall_seconds"]) - wall) / wall


def main() -> None:
    """Runs the trainings and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of each training")
    parser.add_argument("--limit", type=float, help="largest share of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst = 0.0
    for name, model, dataset in (("MLP", Net, Points(8 * 500)), ("GPT-2", gpt2, texts())):
        step = statistics.median(cost(model(), dataset, 3 * RECORD, 5).seconds("without"))
        length = max(4, min(40, round(0.02 / step)))
        turns = cost(model(), dataset, 3 * RECORD + round(options.seconds / step), length)
        without, record = turns.seconds("without"), statistics.median(turns.records)
        plain = statistics.median(without)
        print(f"{name}: {plain * 1e6:.1f} us of a step without figures, {len(without)} turns of {length} steps")
        for kind in KINDS[1:]:
            shares = [own / other - 1 for own, other in zip(turns.seconds(kind), without, strict=False)]
            share = statistics.median(shares)
            error = statistics.stdev(shares) / len(shares) ** 0.5
            print(f"  {kind:8} {share:+8.2%} of a step (give or take {error:.2%})")
            worst = max(worst, share)
        print(f"  record   {record / RECORD / plain:+8.2%} of a step ({record * 1e6:.0f} us, every {RECORD} steps)")
        print(f"  the activities differ by {gap(model(), dataset, 3 * RECORD):.3%} from the wall time", flush=True)
    if options.limit is not None and worst > options.limit:
        sys.exit(f"the figures cost {worst:.2%} of a step, more than {options.limit:.2%}")


if __name__ == "__main__":
    main()

"""Logs of runs that never took place, with all that a log can hold."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

BEGIN = 1_790_000_000.0
ENVIRONMENT = {
    "trainer_kit": "0.1.0", "Python": "3.11.7", "PyTorch": "2.13.0", "host": "node-7",
    "device": "NVIDIA H100 80GB HBM3", "processes": 8, "precision": "bf16",
}  # fmt: skip
SECONDS = {"data": 0.4, "forward": 2.6, "backward": 5.0, "optimizer": 0.7, "logging": 0.02, "loop": 0.1}


class RunLog:
    """Writes the log of a run, record by record, with a clock of its own.

    Args:
        folder: Of the run; made where it is missing.
        noise: Seed of the figures' noise.
        arguments: Of the run, beside the usual ones.
    """

    def __init__(self, folder: Path, noise: int = 0, **arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self.path.write_bytes(b"")
        self.time, self.step = BEGIN, 0
        self.arguments = {
            "output_dir": str(folder), "learning_rate": 3e-4, "per_device_train_batch_size": 16, "max_steps": 2000,
            "mixed_precision": "bf16", "seed": 42, "metric_for_best_model": "eval_loss", "greater_is_better": False,
        } | arguments  # fmt: skip
        self._noise = random.Random(noise)
        self.totals: dict[str, float] = {}

    def write(self, event: str, **values: Any) -> None:
        record = {"event": event, "time": self.time, "step": self.step, **values}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def start(self, down: float = 0.0, step: int | None = None, **values: Any) -> None:
        """A start, `down` seconds after the last record, which goes on from `step`."""
        self.time += down + 12
        self.step = self.step if step is None else step
        self.totals["setup"] = self.totals.get("setup", 0.0) + 12
        told = {
            "format": 1,
            "began": self.time - 12,
            "trainer_kit": "0.1.0",
            "total_steps": 2000,
            "environment": ENVIRONMENT,
        }
        counts = {"parameters": 124_439_808, "trainable": 124_439_808}
        self.write("start", **(told | counts | {"arguments": self.arguments} | values))

    def log(self, steps: int = 10, **values: Any) -> None:
        """A record after `steps` more steps, with the figures of all callbacks."""
        noise = self._noise
        self.step += steps
        done = self.step / 2000
        spent = {name: seconds * steps / 10 * noise.uniform(0.9, 1.1) for name, seconds in SECONDS.items()}
        spent |= {"callback/Progress": 0.01, "callback/TensorBoard": 0.03}
        spent |= {name: values.pop(name) for name in ("evaluation", "saving") if name in values}
        self.time += sum(spent.values())
        for name, seconds in spent.items():
            self.totals[name] = self.totals.get(name, 0.0) + seconds
        useful = sum(spent[name] for name in ("forward", "backward", "optimizer")) / sum(spent.values())
        rate = steps * 128 / (sum(spent.values()) - spent.get("evaluation", 0.0) - spent.get("saving", 0.0))
        record = {
            "epoch": 3 * done,
            "loss": 3.2 + 7.6 * math.exp(-6 * done) + noise.gauss(0, 0.06),
            "grad_norm": (0.6 + 3 * math.exp(-8 * done)) * noise.lognormvariate(0, 0.18),
            "learning_rate": 3e-4 * min(20 * done, 0.5 + 0.5 * math.cos(math.pi * done)),
            "samples_per_second": rate, "steps_per_second": rate / 128, "tokens_per_second": rate * 1024,
            "data_wait": spent["data"] / sum(spent.values()),
            "model_flops_per_second": 1.0e12 * rate, "mfu": 0.0026 * rate,
            "goodput": useful,
            "memory_gib": 21.4 + noise.uniform(0, 0.3), "peak_memory_gib": 38.25, "reserved_memory_gib": 41.5,
            "process_memory_gib": 42.4, "device_memory_gib": 42.9, "host_memory_gib": 5.5 + done,
            "fragmentation": 0.08,
            "anatomy/weights_gib": 0.464, "anatomy/gradients_gib": 0.464, "anatomy/optimizer_gib": 0.927,
            "anatomy/activations_gib": 36.395,
        } | {f"seconds/{name}": seconds for name, seconds in spent.items()}  # fmt: skip
        self.write("log", **(record | values))

    def evaluate(self, **values: Any) -> None:
        loss = 3.25 + 7.5 * math.exp(-6 * self.step / 2000) + self.step / 20000
        figures = {"eval_loss": loss, "eval_accuracy": 0.62 - 0.05 * loss, "eval_runtime": 9.5}
        self.write("evaluate", **(figures | {"eval_samples_per_second": 420.0, "eval_steps_per_second": 6.6} | values))

    def train(self, to: int, every: int = 10, saves: int = 200) -> None:
        """Trains to a step, with an evaluation and a checkpoint every `saves` steps."""
        pauses: dict[str, float] = {}
        while self.step < to:
            self.log(every, **pauses)
            pauses = {}
            if self.step % saves == 0:
                pauses = {"evaluation": 9.5, "saving": 1.5}
                self.time += 9.5
                self.evaluate()
                self.time += 1.5
                self.write("save", directory=f"checkpoint-{self.step}")
                self.time -= 11.0  # the next record counts them

    def end(self, **values: Any) -> None:
        self.time += 12
        totals = {f"seconds/{name}": seconds for name, seconds in self.totals.items()}
        figures = {"epoch": 3.0, "train_loss": 4.02, "train_runtime": 1700.0, "train_samples_per_second": 140.0}
        self.write("log", **(figures | {"peak_memory_gib": 38.25, "mfu": 0.37} | totals | values))
        self.write("end")


def finished(folder: Path, noise: int = 0, **arguments: Any) -> Path:
    """A run of 2,000 steps that came to its end; returns its folder."""
    log = RunLog(folder, noise, **arguments)
    log.start()
    log.train(2000)
    log.end()
    return folder


def eventful(folder: Path) -> Path:
    """A run that was killed once, broke off once, warned, and came to its end; returns its folder."""
    log = RunLog(folder, noise=1, learning_rate=6e-4)
    log.start()
    log.train(730)
    done, log.totals = log.totals, {}
    log.start(down=420, step=600)
    log.write("warning", message="step 610 took 40 s: the file system hangs", source="trainer_kit")
    log.train(1380)
    log.write("warning", message="lr_scheduler.step() was called twice", source="UserWarning")
    log.write("exception", type="ConnectionResetError", message="the other end has hung up")
    log.start(down=95, step=1200)
    log.train(2000)
    log.totals = {name: log.totals.get(name, 0.0) + seconds for name, seconds in done.items()}
    log.totals |= {"lost": 270.0, "down": 515.0}
    log.end()
    return folder


def elastic(folder: Path) -> Path:
    """A run of 3 machines that lost one, went on, took it in again and came to its end; returns its folder."""
    log = RunLog(folder, noise=2)
    log.start()
    log.train(730)
    log.time += 0.6
    gone: dict[str, Any] = {"number": 2, "machines": 2, "machines_before": 3, "processes": 16, "processes_before": 24}
    gone |= {"lost": ["node3"], "joined": [], "cause": "rank 17 on node3 was lost", "pause": 0.6, "again": 1}
    log.write("membership", **gone, in_process=True)
    log.train(1380)
    log.write("end", ending="signal", exit_code=143)
    log.start(down=95)
    come: dict[str, Any] = {"number": 3, "machines": 3, "machines_before": 2, "processes": 24, "processes_before": 16}
    log.write("membership", **come, lost=[], joined=["node3"], cause="", pause=107.0, again=0, in_process=False)
    log.train(2000)
    log.end()
    return folder

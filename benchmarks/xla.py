"""XLA: the Trainer against a hand-written torch_xla loop, on the devices of PJRT_DEVICE (default: XLA's CPU client).

`python benchmarks/xla.py` trains the same transformer both ways in turn: AdamW with a linear schedule, clipping to 1.0,
dropout, batches from a device loader. It prints the steps per second, their ratio, the graphs that each way compiled,
and the transfers between host and devices in a step that does not log. `CPU_NUM_DEVICES=4` makes a mesh of four.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime
from torch.utils.data import DataLoader, Dataset
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from trainer_kit import XLA, Callback, Run, Trainer, TrainingArguments

BATCH, LENGTH, CLASSES = 16, 64, 8
WARM_UP = 5
"""Steps that are not measured: the first two are compiled."""


class Texts(Dataset[Any]):
    """Random tokens with a class for each row."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 512, (length, LENGTH), generator=generator)
        self.labels = torch.randint(0, CLASSES, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.ids[index], "labels": self.labels[index]}


class Net(torch.nn.Module):
    """A small transformer that classifies; returns its loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embedding(x)).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels)}


def compiles() -> int:
    """Graphs that this process has compiled."""
    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def transfers() -> tuple[int, int]:
    """Transfers to the devices and from them so far."""
    data = [met.metric_data(name) for name in ("TransferToDeviceTime", "TransferFromDeviceTime")]
    return (data[0][0] if data[0] else 0), (data[1][0] if data[1] else 0)


class Meter:
    """Measures the steps after the warm-up."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.compiled = compiles()

    def begin(self) -> None:
        torch_xla.sync(wait=True)
        self.time, self.transfers = time.perf_counter(), transfers()

    def watch(self) -> None:
        """Before the steps' own results are read."""
        to, back = transfers()
        count = self.steps - WARM_UP
        self.per_step = (to - self.transfers[0]) / count, (back - self.transfers[1]) / count

    def end(self) -> None:
        torch_xla.sync(wait=True)
        self.seconds = (time.perf_counter() - self.time) / (self.steps - WARM_UP)
        self.compiled = compiles() - self.compiled


def plain(dataset: Texts, steps: int, shape: tuple[int, int]) -> Meter:
    """A loop as one would write it by hand."""
    meter, device, count = Meter(steps), torch_xla.device(), runtime.global_runtime_device_count()
    model = Net(*shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)
    sharding = None
    if count > 1:
        mesh = spmd.Mesh(list(range(count)), (count,), ("data",))
        sharding = {
            "x": spmd.ShardingSpec(mesh, ("data", None)),
            "labels": spmd.ShardingSpec(mesh, ("data",)),
        }
    step = 0
    while step < steps:
        for batch in MpDeviceLoader(loader, device, input_sharding=sharding):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step == WARM_UP:
                meter.begin()
            if step == steps:
                break
    meter.watch()
    meter.end()
    return meter


class Clock(Callback):
    """Starts and stops a meter."""

    priority = 1000

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, run: Run) -> None:
        if run.state.step == WARM_UP:
            self.meter.begin()
        if run.state.step == self.meter.steps:
            self.meter.watch()
            self.meter.end()


def trainer(dataset: Texts, steps: int, shape: tuple[int, int]) -> Meter:
    """The Trainer with its defaults, progress bar off."""
    meter = Meter(steps)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, learning_rate=1e-3, logging_steps=10 * steps, disable_tqdm=True,
            save_strategy="no", log_level="error", dataloader_drop_last=True,
            per_device_train_batch_size=BATCH // runtime.global_runtime_device_count(),
        )  # fmt: skip
        Trainer(Net(*shape), args, dataset, callbacks=[Clock(meter)], strategy=XLA()).train()
    return meter


def main() -> None:
    """Measures both in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if runtime.global_runtime_device_count() > 1:
        runtime.use_spmd()
    dataset, shape = Texts(2000), (options.width, options.layers)
    rows, first = [], []
    for turn in range(options.turns + 1):
        meters = plain(dataset, options.steps, shape), trainer(dataset, options.steps, shape)
        if turn == 0:  # later turns find their graphs compiled
            first = [meter.compiled for meter in meters]
        else:
            rows.append([1 / meter.seconds for meter in meters])
    by_hand, ours = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = sorted(row[1] / row[0] for row in rows)
    print(f"devices                    {runtime.global_runtime_device_count():8d}")
    print(f"hand-written loop          {by_hand:8.2f} steps/s")
    print(f"Trainer                    {ours:8.2f} steps/s")
    print(f"ratio                      {statistics.median(ratios):8.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})")
    print(f"graphs, hand-written loop  {first[0]:8d}")
    print(f"graphs, Trainer            {first[1]:8d}")
    for name, meter in zip(("hand-written loop", "Trainer"), meters, strict=True):
        to, back = meter.per_step
        print(f"transfers a step, {name}: {to:.2f} to the devices, {back:.2f} from them")


if __name__ == "__main__":
    main()

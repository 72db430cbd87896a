"""Models sharded over processes of this machine's CPU: steps, memory and checkpoints against torch's own engine.

`python benchmarks/sharding.py` starts 2 processes and then 4 with torchrun, which measure four things:

- a step of the Trainer with `FSDP` against a hand-written loop with `fully_shard`: the same model, units, batches and
  fused AdamW with a linear schedule, clipping to 1.0, a step of one after a step of the other;
- the memory of a process in training and in a save, beyond what it has before the model is made, against the formula;
- a save of the Trainer against `torch.distributed.checkpoint.save` and `async_save` of the same state, in turn in one
  training: how long training stands still, how much later it is when the save is on the disk, how long that takes, and
  bytes; and loading it;
- a copy of the state to memory (`PeerCopies`), each process standing for a machine: how long training stands still, and
  how long it takes until all have their own part and their peer's. About 64 MiB a process with `--part copies
  --processes 2 --layers 3`.

Numbers are medians over steps or turns, ratios medians of the ratios of each. Needs 4 GB of disk space in the folder
for temporary files.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from ddp_loop import BATCH, WARM_UP, Net, Texts
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from trainer_kit import FSDP, Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import PeerCopies
from trainer_kit.checkpoint.peer_copies import PeerCopier
from trainer_kit.memory import estimate

dcp: Any = torch.distributed.checkpoint

MIB = 2**20
Shape = tuple[int, int]


def make_trainer(shape: Shape, name: str, callbacks: Sequence[Callback] = (), **changes: Any) -> Trainer:
    """Return a Trainer of a sharded model that does nothing but train."""
    values: dict[str, Any] = {
        "output_dir": f"{os.environ['BENCHMARK_FOLDER']}/{name}", "use_cpu": True, "learning_rate": 1e-3,
        "per_device_train_batch_size": BATCH, "save_strategy": "no", "report_to": "none", "logging_steps": 50,
        "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
    args = TrainingArguments(**values | changes)
    strategy = FSDP(device="cpu")
    return Trainer(
        args=args, train_dataset=Texts(4000), callbacks=callbacks, strategy=strategy, model_init=lambda: Net(*shape)
    )


def make_plain(shape: Shape) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model that is sharded by hand into the same units, and its optimizer."""
    model = Net(*shape)
    for layer in model.layers.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)


def show(text: str) -> None:
    """Print on the main process."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# A step


class PlainLoop:
    """A loop as one would write it by hand, a step at a time."""

    def __init__(self, shape: Shape, steps: int) -> None:
        self.model, self.optimizer = make_plain(shape)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / steps))
        dataset = Texts(4000)
        self.batches = iter(DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset)))

    def step(self) -> None:
        """Take a step."""
        loss = self.model(**next(self.batches))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class Alternate(Callback):
    """Take a step of the plain loop after each step of the Trainer, and measure both.

    Attributes:
        rows: Seconds of a plain step and of the Trainer's next one.
    """

    priority = 1000

    def __init__(self, loop: PlainLoop) -> None:
        self.loop = loop
        self.rows: list[tuple[float, float]] = []
        self._end = self._plain = 0.0

    def on_step_end(self, run: Run) -> None:
        now = time.perf_counter()
        if run.state.step > WARM_UP:
            self.rows.append((self._plain, now - self._end))
        self.loop.step()
        self._end = time.perf_counter()
        self._plain = self._end - now


def compare_steps(options: argparse.Namespace) -> None:
    """Print the time of a step in both ways, and the ratio of the throughputs."""
    shape = (options.width // 2, options.layers // 2)
    alternate = Alternate(PlainLoop(shape, options.steps))
    make_trainer(shape, "step", [alternate], max_steps=options.steps).train()
    plain, ours = (statistics.median(column) * 1e3 for column in zip(*alternate.rows, strict=True))
    low, middle, high = statistics.quantiles((row[0] / row[1] for row in alternate.rows), n=4)
    show(f"plain fully_shard loop    {plain:8.1f} ms a step")
    show(f"Trainer                   {ours:8.1f} ms a step")
    show(f"ratio of throughputs      {middle:8.3f} (half of the steps: {low:.3f} to {high:.3f})")


# Memory


def memory(field: str) -> int:
    """Return the bytes of a field in the status of this process, such as VmRSS."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Peak(Callback):
    """Measure the peak of memory after the first two steps, optionally with a save after the third."""

    def __init__(self, has_save: bool) -> None:
        self.has_save = has_save
        self.nbytes = 0

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at what is used now
        run.requests.save |= self.has_save and run.state.step == 3

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self.nbytes = memory("VmHWM")


def peak_of(shape: Shape, has_save: bool) -> int:
    """Return the peak of a process in training beyond what it has before, the largest of the processes."""
    gc.collect()
    before, peak = memory("VmRSS"), Peak(has_save)
    changes = {"max_steps": 12, "per_device_train_batch_size": 1}
    make_trainer(shape, f"memory-{has_save}", [peak], **changes).train()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak.nbytes - before)
    return int(max(peaks))


def compare_memory(options: argparse.Namespace) -> None:
    """Print the memory of a process against the formula."""
    shape, count = (options.width, options.layers), dist.get_world_size()
    peak_of((64, 2), has_save=True)  # what torch itself takes once
    trainer = make_trainer(shape, "estimate", per_device_train_batch_size=1)
    batch = {name: value[None] for name, value in Texts(1)[0].items()}
    anatomy = estimate(Net(*shape), trainer.args, batch, world_size=count, fsdp=count)
    del trainer
    training, saving = peak_of(shape, has_save=False), peak_of(shape, has_save=True)
    for component in anatomy.components:
        show(f"  {component.name:23} {component.nbytes / MIB:8.1f} MiB")
    show(f"training, by the formula  {anatomy.peak / MIB:8.1f} MiB")
    show(f"training, measured        {training / MIB:8.1f} MiB   ratio {training / anatomy.peak:.3f}")
    sizes = [each.nbytes for each in Net(*shape).parameters()]
    expected, extra = 3 * sum(sizes) / count + max(sizes), saving - training
    show(f"a save, by the formula    {expected / MIB:8.1f} MiB   state / {count} + the largest tensor")
    show(f"a save, measured          {extra / MIB:8.1f} MiB   ratio {extra / expected:.3f}")


# Checkpoints


OURS, SAVE, ASYNC_SAVE = "Trainer", "dcp.save", "dcp.async_save"


class Saves(Callback):
    """Save in three ways in turn, and measure each.

    Args:
        folder: Where torch's checkpoints go.
        every: Steps from one save to the next.

    Attributes:
        rows: Seconds that training stood still, seconds by which it was later when the save was on the disk, seconds
            until then, and bytes; of each save, by the way.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.rows: dict[str, list[tuple[float, float, float, int]]] = {OURS: [], SAVE: [], ASYNC_SAVE: []}
        self._group = dist.new_group(backend="gloo")
        self._quiet: list[float] = []  # seconds of steps without a save
        self._way = ""  # of the save that is not on the disk yet
        self._is_written: Callable[[], bool] = bool
        self._path = folder
        self._begin = self._end = self._stood = self._saving = 0.0
        self._steps = 0

    def on_step_end(self, run: Run) -> None:
        now, step = time.perf_counter(), run.state.step
        saving = run.ledger.seconds().get("saving", 0.0)
        if self._way:
            self._stood += saving - self._saving
            self._steps += 1
            if self._is_written():
                self._finish(now - self._begin)
        elif step > 2:
            self._quiet.append(now - self._end)
        self._saving = saving
        if step % self.every == 0 and step < run.args.max_steps:
            assert not self._way, "a save takes longer than the steps to the next"
            self._start(run, list(self.rows)[step // self.every % len(self.rows)])
        self._end = time.perf_counter()

    def _start(self, run: Run, way: str) -> None:
        os.sync()
        dist.barrier()
        self._way, self._steps, self._begin = way, 0, time.perf_counter()
        self._path = self.folder / f"{way}-{run.state.step}"
        self._is_written = lambda: True
        if way == OURS:
            self._path = Path(run.args.output_dir) / f"checkpoint-{run.state.step}"
            self._is_written = self._path.exists
            run.requests.save = True
        elif way == SAVE:
            dcp.save(dcp_state(run.model, run.optimizer), checkpoint_id=self._path)
        else:
            future: Any = dcp.async_save(
                dcp_state(run.model, run.optimizer), checkpoint_id=self._path, process_group=self._group
            )
            self._is_written = future.done
        self._stood = time.perf_counter() - self._begin
        if way == SAVE:
            self._finish(self._stood)

    def _finish(self, seconds: float) -> None:
        size = sum(file.stat().st_size for file in self._path.rglob("*") if file.is_file())
        later = seconds - self._steps * statistics.median(self._quiet)
        self.rows[self._way].append((self._stood, later, seconds, size))
        self._way = ""


def dcp_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state that torch's checkpoints hold."""
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


class Begin(Callback):
    """Measure when training begins; a checkpoint is loaded by then."""

    def on_train_begin(self, run: Run) -> None:
        self.time = time.perf_counter()
        run.requests.stop = True


def seconds_to_resume(shape: Shape, checkpoint: Path) -> float:
    """Return the seconds from the call of `train`, which makes the model, to its first step from a checkpoint."""
    begin = Begin()
    trainer = make_trainer(shape, "loading", [begin], max_steps=10_000)
    dist.barrier()
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(checkpoint))
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    return begin.time - start


def seconds_of_dcp_load(shape: Shape, checkpoint: Path) -> float:
    """Return the seconds to make a sharded model and its optimizer, and to load them by `dcp.load`."""
    dist.barrier()
    start = time.perf_counter()
    model, optimizer = make_plain(shape)
    state = dcp_state(model, optimizer)  # makes the optimizer's state
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return time.perf_counter() - start


def compare_checkpoints(options: argparse.Namespace) -> None:
    """Print what saves and loading cost in each way."""
    shape, folder = (options.width, options.layers), Path(os.environ["BENCHMARK_FOLDER"])
    saves = Saves(folder, options.every)
    steps = options.every * (3 * (options.turns + 1) + 1)  # the first saves of each way warm up
    changes = {"max_steps": steps, "save_strategy": "no", "per_device_train_batch_size": 1}
    make_trainer(shape, "saves", [saves], **changes).train()
    show(f"{'':26}  stands still  later by     whole       bytes")
    for way, rows in saves.rows.items():
        stood, later, whole, size = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        show(f"{way:26} {stood:10.3f} s {later:7.3f} s {whole:7.3f} s {size / 1e6:8.1f} MB")
    for way in (SAVE, ASYNC_SAVE):
        pairs = list(zip(saves.rows[OURS][1:], saves.rows[way][1:], strict=True))
        stood, later, whole = (statistics.median(ours[i] / theirs[i] for ours, theirs in pairs) for i in range(3))
        show(f"{'ratio to ' + way:26} {stood:10.3f} {later:9.3f} {whole:9.3f}")
    checkpoint = max((folder / "saves").glob("checkpoint-*"))
    theirs = max(folder.glob(f"{SAVE}-*"))
    loads = [
        (seconds_to_resume(shape, checkpoint), seconds_of_dcp_load(shape, theirs)) for _ in range(options.turns + 1)
    ][1:]
    ours, torchs = (statistics.median(column) for column in zip(*loads, strict=True))
    show(f"make, verify and load      {ours:9.3f} s")
    show(f"make and dcp.load          {torchs:9.3f} s   ratio {statistics.median(a / b for a, b in loads):.3f}")


class Copies(Callback):
    """Measure copies to memory.

    Args:
        every: Steps from one copy to the next.

    Attributes:
        stood: Seconds that training stood still for each copy.
        took: Seconds from the beginning of each copy to its end.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.stood: list[float] = []
        self.took: list[float] = []
        self._begin = PeerCopier.begin
        PeerCopier.begin = lambda copier, *given: self._timed(copier, *given)  # type: ignore[method-assign]
        self._saving = 0.0

    def _timed(self, copier: PeerCopier, *given: Any) -> None:
        start = time.perf_counter()
        self._begin(copier, *given)
        assert copier._copying is not None, "the last copy has not ended"
        copier._copying.result.add_done_callback(lambda done: self.took.append(time.perf_counter() - start))

    def on_step_end(self, run: Run) -> None:
        if run.state.step % self.every == self.every - 1:  # by now the last copy has ended
            saving = run.ledger.seconds().get("saving", 0.0)
            self.stood.append(saving - self._saving)
            self._saving = saving


def measure_copies(options: argparse.Namespace) -> None:
    """Print how long training stands still for a copy to memory, and how long that takes."""
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    memory = Path("/dev/shm" if Path("/dev/shm").is_dir() else os.environ["BENCHMARK_FOLDER"])
    own = Path(tempfile.mkdtemp(dir=memory))
    copies = Copies(options.every)
    changes = {"max_steps": options.every * (options.turns + 3), "save_strategy": "epoch", "num_train_epochs": 10_000}
    callbacks = [PeerCopies(options.every, own), copies]
    trainer = make_trainer((options.width, options.layers), "copies", callbacks, **changes)
    try:
        trainer.train()
    finally:
        shutil.rmtree(own, ignore_errors=True)
    size = 12 * sum(each.numel() for each in trainer.run.model.parameters()) / dist.get_world_size()
    stood, took = statistics.median(copies.stood[2:]), statistics.median(copies.took[1:])
    show(f"copy of {size / MIB:.0f} MiB a process: stands still {stood:.3f} s, takes {took:.3f} s")


PARTS = {
    "step": compare_steps, "memory": compare_memory, "checkpoint": compare_checkpoints, "copies": measure_copies
}  # fmt: skip


def start(options: argparse.Namespace) -> None:
    """Start the processes for each part, one after the other."""
    for processes in [options.processes] if options.processes else [2, 4]:
        for part in [options.part] if options.part else PARTS:
            print(f"\n{part}, {processes} processes", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                environment = os.environ | {"BENCHMARK_FOLDER": folder, "OMP_NUM_THREADS": "1"}
                if part == "memory":  # glibc then returns what is freed, which is slow
                    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
                torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
                command = [sys.executable, "-m", *torchrun, *sys.argv, "--part", part]
                subprocess.run(command, env=environment, check=True, timeout=3600)


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help="default: 2, and then 4")
    parser.add_argument("--part", choices=list(PARTS), help="default: all")
    parser.add_argument("--steps", type=int, default=100, help="steps, for the part step (%(default)s)")
    parser.add_argument("--every", type=int, default=12, help="steps from save to save (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="saves of each way (%(default)s)")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        start(options)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    PARTS[options.part](options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

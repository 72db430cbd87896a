"""One training on a GPU: time of a step, MFU, memory, and the share of the time in which the GPU stands idle.

    python benchmarks/gpu_training.py bert-large              BERT-large in float32: 512 tokens, batch 4, as in the
                                                              guide to a model's anatomy (V100: 8.86 samples a second)
    python benchmarks/gpu_training.py gpt2 --compile          GPT-2 small in bf16, compiled: 1,024 tokens, batch 8
    python benchmarks/gpu_training.py mlp --runner plain      a tiny MLP: the cost of the loop itself
    python benchmarks/gpu_training.py gpt2 --small            small models, which a CPU can train too

The runner is this library's Trainer, transformers' Trainer or a plain loop; all take the same batches in the same
precision with a fused AdamW, a linear schedule and clipping to 1.0, and none logs. Prints one line of JSON.
`scripts/gpu-check` runs all of them, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from loop import Net, Points
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
)
from transformers import Trainer as TransformersTrainer
from transformers import TrainingArguments as TransformersArguments

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.profiling.peak_flops import peak_of

WARM_UP, PROFILED = 10, 5
"""Steps before those that are timed, and steps after them that the profiler sees."""


class Workload(NamedTuple):
    """A model and its data."""

    make_model: Callable[[], torch.nn.Module]
    data: Sequence[Any]
    batch: int
    tokens: int
    bf16: bool


def mlp(small: bool) -> Workload:
    """A tiny MLP, whose step is all loop."""
    data = Points(4096)
    return Workload(Net, [data[index] for index in range(len(data))], 8, 0, False)


def bert_large(small: bool) -> Workload:
    """BERT-large with two classes, or one of a few layers."""
    width, layers = (64, 2) if small else (1024, 24)
    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width
    )
    tokens = 32 if small else 512
    rows = [
        {"input_ids": ids, "labels": torch.tensor(index % 2)} for index, ids in enumerate(random_tokens(512, tokens))
    ]
    return Workload(lambda: BertForSequenceClassification(config), rows, 4, tokens, False)


def gpt2(small: bool) -> Workload:
    """GPT-2 small on sequences of 1,024 tokens, or one of a few layers."""
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=1_000) if small else GPT2Config()
    tokens = 32 if small else 1024
    rows = [{"input_ids": ids, "labels": ids} for ids in random_tokens(512, tokens, min(30_000, config.vocab_size))]
    return Workload(lambda: GPT2LMHeadModel(config), rows, 8, tokens, True)


def random_tokens(rows: int, tokens: int, limit: int = 30_000) -> torch.Tensor:
    """Return token ids below a limit, of shape (rows, tokens)."""
    return torch.randint(100, limit, (rows, tokens), generator=torch.Generator().manual_seed(0))


WORKLOADS = {"mlp": mlp, "bert-large": bert_large, "gpt2": gpt2}


class Meter:
    """Times the steps after a warm-up, then profiles a few more.

    Args:
        device: Device of the training.
        steps: Steps to time.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps, self.step = device, steps, 0
        self.seconds = 0.0
        self.peaks: dict[str, float] = {}
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if device.type == "cuda" else None

    @property
    def all_steps(self) -> int:
        """Return the steps that the training has to take."""
        return WARM_UP + self.steps + PROFILED

    def step_end(self) -> None:
        """Note the end of a step."""
        self.step += 1
        if self.step not in (WARM_UP, WARM_UP + self.steps, self.all_steps):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.step == WARM_UP:
            self._begin = time.perf_counter()
        elif self.step == WARM_UP + self.steps:
            self.seconds = (time.perf_counter() - self._begin) / self.steps
            if self._profile is not None:
                self.peaks["allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
                self.peaks["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
                free, total = torch.cuda.mem_get_info()
                self.peaks["driver_mib"] = (total - free) / 2**20  # of all processes, as nvidia-smi shows it
                self._profile.start()
        elif self._profile is not None:
            self._profile.stop()

    def idle(self) -> float | None:
        """Return the share of the profiled time in which no kernel ran; None without a GPU, or if none was seen."""
        if self._profile is None:
            return None
        spans = [(event.time_range.start, event.time_range.end) for event in self._profile.events() or []]
        return idle_share(spans)


def idle_share(spans: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end that no span covers; None without a span."""
    if not spans:
        return None
    ordered = sorted(spans)
    covered, until = 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - covered / (until - ordered[0][0])


def train_plainly(work: Workload, meter: Meter, compiled: bool) -> None:
    """Train with a loop as one would write it by hand."""
    model = work.make_model().to(meter.device)
    forward: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / meter.all_steps))
    while meter.step < meter.all_steps:
        for batch in DataLoader(work.data, batch_size=work.batch, shuffle=True, drop_last=True, pin_memory=on_gpu()):  # type: ignore[arg-type]
            batch = {name: value.to(meter.device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(meter.device.type, torch.bfloat16, enabled=work.bf16):
                loss = forward(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            meter.step_end()
            if meter.step == meter.all_steps:
                break


class MeterCallback(Callback):
    """Tells a meter of this library's steps."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, run: Run) -> None:
        self.meter.step_end()


def train_here(work: Workload, meter: Meter, compiled: bool) -> None:
    """Train with this library's Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=meter.all_steps, per_device_train_batch_size=work.batch, learning_rate=1e-4,
            mixed_precision="bf16" if work.bf16 else "no", torch_compile=compiled, logging_strategy="no",
            save_strategy="no", report_to="none", disable_tqdm=True, log_level="error",
        )  # fmt: skip
        Trainer(work.make_model(), args, work.data, callbacks=[MeterCallback(meter)]).train()


class MeterTransformersCallback(TrainerCallback):
    """Tells a meter of the steps of transformers' Trainer."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.step_end()


def train_with_transformers(work: Workload, meter: Meter, compiled: bool) -> None:
    """Train with transformers' Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        args = TransformersArguments(
            output_dir=folder, max_steps=meter.all_steps, per_device_train_batch_size=work.batch, learning_rate=1e-4,
            bf16=work.bf16, torch_compile=compiled, logging_strategy="no", save_strategy="no", report_to="none",
            disable_tqdm=True, optim="adamw_torch_fused", remove_unused_columns=False, use_cpu=not on_gpu(),
        )  # fmt: skip
        callbacks: list[TrainerCallback] = [MeterTransformersCallback(meter)]
        TransformersTrainer(work.make_model(), args, train_dataset=work.data, callbacks=callbacks).train()


RUNNERS = {"trainer_kit": train_here, "transformers": train_with_transformers, "plain": train_plainly}


def flops_of_a_step(work: Workload) -> int:
    """Return the floating-point operations of a step, forward and backward, counted on the meta device."""
    with torch.device("meta"):
        model = work.make_model()
    batch = {
        name: torch.empty((work.batch, *value.shape), dtype=value.dtype, device="meta")
        for name, value in work.data[0].items()
    }
    with FlopCounterMode(display=False) as counter:
        model(**batch)["loss"].backward()
    return int(counter.get_total_flops())


def on_gpu() -> bool:
    """Return whether there is a GPU, which all runners then use."""
    return torch.cuda.is_available()


def measure(name: str, runner: str, compiled: bool, small: bool, steps: int) -> dict[str, Any]:
    """Train, and return the figures; those that this machine does not give are left out."""
    work = WORKLOADS[name](small)
    meter = Meter(torch.device("cuda" if on_gpu() else "cpu"), steps)
    flops = flops_of_a_step(work)  # before transformers' Trainer, after which a GPT-2 does not run on "meta"
    torch.manual_seed(0)
    RUNNERS[runner](work, meter, compiled)
    figures = {
        "workload": name, "runner": runner, "compiled": compiled, "small": small, "steps": steps,
        "device": torch.cuda.get_device_name() if on_gpu() else "cpu",
        "milliseconds_per_step": 1e3 * meter.seconds, "samples_per_second": work.batch / meter.seconds,
    }  # fmt: skip
    if work.tokens:
        figures["tokens_per_second"] = work.batch * work.tokens / meter.seconds
    try:
        peak = peak_of(meter.device, torch.bfloat16 if work.bf16 else torch.float32)
        figures["mfu"] = flops / meter.seconds / peak.flops_per_second
    except LookupError:
        pass
    if (idle := meter.idle()) is not None:
        figures["idle"] = idle
    return figures | meter.peaks


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure one training and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--runner", choices=RUNNERS, default="trainer_kit")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--small", action="store_true", help="a model of a few layers")
    parser.add_argument("--steps", type=int, default=50, help="steps to time (default: %(default)s)")
    options = parser.parse_args(argv)
    figures = measure(options.workload, options.runner, options.compile, options.small, options.steps)
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()

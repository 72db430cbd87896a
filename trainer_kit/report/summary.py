"""`print_summary`: time, speed and memory of a training in three or four lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from trainer_kit.run import TrainOutput

_MIB_PER_GIB = 1024


def print_summary(result: TrainOutput) -> None:
    """Print time, samples per second and memory of a training, like transformers' guide to the anatomy of training.

    Time is in seconds, memory in MiB. With a GPU the figures are the occupied memory of the whole card from NVML,
    including other processes (or PyTorch's reserved memory without NVML), and the peak of tensors. Elsewhere the figure
    is the peak of the process, or of a TPU that reports one. The lines have the format of `print_summary` in "Model
    training anatomy" of transformers' documentation.

    Args:
        result: Result of `Trainer.train`.

    Raises:
        TypeError: If it is another object.
    """
    metrics = getattr(result, "metrics", None)
    if not isinstance(metrics, Mapping) or "train_runtime" not in metrics:
        raise TypeError(f"print_summary got a {type(result).__name__}; give what Trainer.train() returned")
    print(f"Time: {metrics['train_runtime']:.2f}")
    print(f"Samples/second: {metrics['train_samples_per_second']:.2f}")
    for what, gib in _memory(metrics):
        print(f"{what}: {gib * _MIB_PER_GIB:.0f} MiB")


def _memory(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the memory figures in GiB with their names; the device may report none."""
    occupied = metrics.get("device_memory_gib", metrics.get("reserved_memory_gib"))
    on_gpu = occupied is not None
    peak = "Peak GPU memory" if on_gpu else "Peak memory"
    figures = {"GPU memory occupied": occupied, peak: metrics.get("peak_memory_gib")}
    return ((what, gib) for what, gib in figures.items() if isinstance(gib, Real))

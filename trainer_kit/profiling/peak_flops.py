"""Peak FLOP/s of devices, the reference for a training's FLOP/s.

The figures are for dense matrices (data sheets print those of structured sparsity, twice as many, larger) at boost
clock, with accumulation in fp32, as in training, where a card is slower at that. A CPU's peak is measured.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

TERA = 1e12

_MEASURED_SECONDS = 0.2
_LARGEST = 4096
"""Rows and columns of the largest matrix in the measurement of a CPU's peak."""
_TRIES = 3
"""Number of products of the last size: a single one may be slow on a busy machine."""

_COLUMNS = ("float32", "tf32", "bfloat16", "float16")
# fmt: off
_TABLE: dict[str, tuple[float | None, float | None, float | None, float | None, str]] = {
    # Name from torch.cuda.get_device_name without the vendor: TFLOP/s in fp32, TF32, bf16, fp16; source.
    r"V100-SXM2.*":           (15.7, None, None, 125, "NVIDIA V100 data sheet (2020)"),
    r"V100-PCIE.*":           (14.0, None, None, 112, "NVIDIA V100 data sheet (2020)"),
    r"V100S-PCIE.*":          (16.4, None, None, 130, "NVIDIA V100 data sheet (2020)"),
    r"T4":                    (8.1, None, None, 65, "NVIDIA T4 data sheet (2019)"),
    r"A10":                   (31.2, 62.5, 125, 125, "NVIDIA A10 data sheet (2021)"),
    r"A10G":                  (35, 35, 70, 70, "A10G data sheet of NVIDIA and AWS (2022)"),
    r"A30":                   (10.3, 82, 165, 165, "NVIDIA A30 data sheet (2022)"),
    r"A40":                   (37.4, 74.8, 149.7, 149.7, "NVIDIA A40 data sheet (2021)"),
    r"A100[- ].*":            (19.5, 156, 312, 312, "NVIDIA A100 data sheet (2021)"),
    r"RTX A6000":             (38.7, 77.4, 154.8, 154.8, "NVIDIA Ampere GA102 whitepaper 2.1, appendix"),
    r"GeForce RTX 3090":      (35.6, 35.6, 71, 71, "NVIDIA Ampere GA102 whitepaper 2.1, table 2"),
    r"L4":                    (30.3, 60, 121, 121, "NVIDIA L4 data sheet (2023)"),
    r"L40":                   (90.5, 90.5, 181, 181, "NVIDIA L40 data sheet (2023)"),
    r"L40S":                  (91.6, 183, 362, 362, "NVIDIA L40S data sheet (2023)"),
    r"RTX 6000 Ada Generation": (91.1, 182.1, 364.2, 364.2, "NVIDIA Ada GPU architecture whitepaper 2.1, appendix"),
    r"GeForce RTX 4090":      (82.6, 82.6, 165.2, 165.2, "NVIDIA Ada GPU architecture whitepaper 2.1, table 2"),
    r"H100 PCIe":             (51, 378, 756, 756, "NVIDIA H100 data sheet (2022)"),
    r"H100 NVL":              (60, 417.5, 835.5, 835.5, "NVIDIA H100 data sheet (2024)"),
    r"H100( SXM5?)?( \d+GB HBM3)?": (67, 494.5, 989.5, 989.5, "NVIDIA H100 data sheet (2024)"),
    r"GH200 .*":              (67, 494.5, 989.5, 989.5, "NVIDIA GH200 data sheet (2024)"),
    r"H200":                  (67, 494.5, 989.5, 989.5, "NVIDIA H200 data sheet (2024)"),
    r"H200 NVL":              (60, 417.5, 835.5, 835.5, "NVIDIA H200 data sheet (2024)"),
    r"B200":                  (80, 1100, 2250, 2250, "NVIDIA Blackwell architecture technical brief (2024), HGX B200"),
    r"GB200":                 (90, 1250, 2500, 2500, "NVIDIA Blackwell architecture technical brief (2024), GB200"),
    # Per chip; a v3 chip has two cores, which are separate devices.
    r"TPU v3":                (None, None, 123, None, "Google Cloud documentation, TPU v3"),
    r"TPU v4":                (None, None, 275, None, "Google Cloud documentation, TPU v4"),
    r"TPU v5e":               (None, None, 197, None, "Google Cloud documentation, TPU v5e"),
    r"TPU v5p":               (None, None, 459, None, "Google Cloud documentation, TPU v5p"),
    r"TPU v6e":               (None, None, 918, None, "Google Cloud documentation, TPU v6e"),
}
# fmt: on


class Peak(NamedTuple):
    """Peak performance of a device.

    Attributes:
        flops_per_second: FLOP/s in matrix products.
        source: Source of the figure.
    """

    flops_per_second: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of a device of this process.

    Args:
        device: A CUDA GPU, or the CPU, whose peak is measured at the first call, in some tenths of a second.
        dtype: Dtype of matrix products; float32 means TF32 where torch may use that in matrix products (convolutions
            have a separate switch, which is on by default and is not considered here).

    Raises:
        LookupError: If the peak is unknown; the message says why.
    """
    if device.type == "cpu":
        return measured_peak(dtype)
    if device.type != "cuda":
        raise LookupError(f"no peak FLOP/s are known for devices of the type {device.type}")
    uses_tf32 = dtype == torch.float32 and _allows_tf32() and torch.cuda.get_device_capability(device) >= (8, 0)
    return listed_peak(torch.cuda.get_device_name(device), "tf32" if uses_tf32 else dtype)


def tf32_peak(device: torch.device) -> Peak | None:
    """Return the peak in TF32 of a device that has it but may not use it; None for any other."""
    if device.type != "cuda" or _allows_tf32():
        return None
    try:
        return listed_peak(torch.cuda.get_device_name(device), "tf32")
    except LookupError:
        return None


def listed_peak(name: str, dtype: torch.dtype | str) -> Peak:
    """Return the peak of a device in the table.

    Args:
        name: Name as torch.cuda.get_device_name returns it; "TPU v5e" and the like.
        dtype: A dtype of torch, or "tf32".

    Raises:
        LookupError: If the table has no such device, or the device does not compute natively in that dtype.
    """
    column = str(dtype).removeprefix("torch.")
    short = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    found = next((row for pattern, row in _TABLE.items() if re.fullmatch(pattern, short)), None)
    if found is None or " MIG " in name:  # a slice of a GPU
        raise LookupError(f"the table of peak FLOP/s (trainer_kit/profiling/peak_flops.py) has no {name}")
    figure = dict(zip(_COLUMNS, found, strict=False)).get(column)
    if not isinstance(figure, (int, float)):
        raise LookupError(
            f"the table of peak FLOP/s (trainer_kit/profiling/peak_flops.py) has none of {name} in {column}"
        )
    return Peak(figure * TERA, found[-1])


@functools.cache
def measured_peak(dtype: torch.dtype) -> Peak:
    """Measure the CPU's peak: the best of several products of square matrices, with torch's current number of threads.

    Args:
        dtype: Dtype of the matrices.

    Raises:
        LookupError: If torch cannot multiply such matrices on CPUs.
    """
    size, best = 128, 0.0
    with torch.no_grad():
        try:
            matrix = torch.full((size, size), 0.5, dtype=dtype)
            deadline, tries = time.perf_counter() + _MEASURED_SECONDS, 0
            while tries < _TRIES or time.perf_counter() < deadline:
                begin = time.perf_counter()
                matrix @ matrix
                seconds = time.perf_counter() - begin
                best, tries = max(best, 2 * size**3 / seconds), tries + 1
                # A matrix of twice the size takes up to eight times as long, a third of the time limit.
                if seconds < _MEASURED_SECONDS / 24 and size < _LARGEST:
                    size, tries = 2 * size, 0
                    matrix = torch.full((size, size), 0.5, dtype=dtype)
        except RuntimeError as error:
            raise LookupError(f"the CPU's peak FLOP/s in {dtype} cannot be measured: {error}") from error
    return Peak(best, f"measured: products of matrices of up to {size} x {size} with {torch.get_num_threads()} threads")


def computing_dtype(model: torch.nn.Module, mixed_precision: str) -> torch.dtype:
    """Return the dtype of most of a model's matrix products: autocast's, else that of most of its weights.

    Args:
        model: The model.
        mixed_precision: "no", "fp16", "bf16", or "fp8", which counts as bf16: layers outside of it stay there.
    """
    autocast: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    if mixed_precision in autocast:
        return autocast[mixed_precision]
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _allows_tf32() -> bool:
    """Return whether TF32 is enabled; torch 2.9 and later raise an error if its two interfaces are mixed."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return precision == "tf32" if precision is not None else torch.get_float32_matmul_precision() != "highest"

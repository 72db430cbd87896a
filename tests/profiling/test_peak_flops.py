from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.profiling import peak_flops
from trainer_kit.profiling.peak_flops import computing_dtype, listed_peak, measured_peak, peak_of, tf32_peak


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312),
        ("A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.float16, 835.5),
        ("NVIDIA H200", torch.bfloat16, 989.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.5),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA L4", torch.float16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA GeForce RTX 3090", torch.float16, 71),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla T4", torch.float16, 65),
        ("TPU v5p", torch.bfloat16, 459),
    ],
)
def test_the_table(name: str, dtype: Any, tera: float) -> None:
    peak = listed_peak(name, dtype)
    assert peak.flops_per_second == tera * 1e12
    assert peak.source


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A1000", "NVIDIA RTX A1000", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H20", "AMD Instinct MI300X",
    ],
)  # fmt: skip
def test_a_device_that_is_not_in_the_table(name: str) -> None:
    with pytest.raises(LookupError, match=f"has no {name}$"):
        listed_peak(name, torch.float16)


def test_a_dtype_that_a_device_does_not_compute_in() -> None:
    with pytest.raises(LookupError, match="has none of Tesla T4 in bfloat16"):
        listed_peak("Tesla T4", torch.bfloat16)


def test_figures_grow_from_fp32_to_16_bits_and_have_a_source() -> None:
    for name, (*figures, source) in peak_flops._TABLE.items():
        known = [figure for figure in figures if figure is not None]
        assert known == sorted(known), name
        assert isinstance(source, str), name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.usefixtures("gpu")
def test_tf32_counts_where_torch_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, before = torch.device("cuda", 0), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_of(device, torch.float32).flops_per_second == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak_of(device, torch.float32).flops_per_second == 156e12
        assert peak_of(device, torch.bfloat16).flops_per_second == 312e12
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # which has none
        assert peak_of(device, torch.float32).flops_per_second == 19.5e12
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("gpu")
def test_a_device_with_tf32_is_known_where_it_may_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, before = torch.device("cuda", 0), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        peak = tf32_peak(device)
        assert peak is not None
        assert peak.flops_per_second == 156e12
        assert tf32_peak(torch.device("cpu")) is None
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
        assert tf32_peak(device) is None
        torch.set_float32_matmul_precision("high")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
        assert tf32_peak(device) is None
    finally:
        torch.set_float32_matmul_precision(before)


def test_another_kind_of_device() -> None:
    with pytest.raises(LookupError, match="of the type meta"):
        peak_of(torch.device("meta"), torch.float32)


def test_the_peak_of_a_cpu_is_that_of_its_matrix_products() -> None:
    measured_peak.cache_clear()
    state = torch.get_rng_state()
    peak = peak_of(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    matrix = torch.ones(512, 512)
    begin = time.perf_counter()
    for _ in range(5):
        matrix @ matrix
    reached = 5 * 2 * 512**3 / (time.perf_counter() - begin)
    assert 0 < reached < 10 * peak.flops_per_second  # the machine may be busy at one time or the other
    assert peak.source.startswith("measured")
    assert peak_of(torch.device("cpu"), torch.float32) is peak  # once


@pytest.mark.parametrize("waits", [0.005, 0.03])
def test_the_peak_of_a_busy_machine_is_not_that_of_its_smallest_matrices(
    waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product waits for processors that others use, but for the second of each three: `waits` seconds, or 0.001."""
    sizes: list[int] = []
    now, products = 0.0, itertools.count()

    class Matrix:
        def __init__(self, size: int) -> None:
            sizes.append(size)

        def __matmul__(self, other: Any) -> None:
            nonlocal now
            now += (0.001 if next(products) % 3 == 1 else waits) + 2 * sizes[-1] ** 3 / 1e11

    monkeypatch.setattr(peak_flops, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype: Matrix(shape[0]))
    measured_peak.cache_clear()
    assert measured_peak(torch.float32).flops_per_second > 0.5e11
    assert now < 1
    assert sizes[-1] <= 2048
    measured_peak.cache_clear()


def test_a_dtype_that_cannot_be_measured() -> None:
    with pytest.raises(LookupError, match="cannot be measured"):
        measured_peak(torch.bool)


def test_the_dtype_in_which_a_model_computes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Embedding(3, 2, dtype=torch.float64))
    assert computing_dtype(model, "no") == torch.float32
    assert computing_dtype(model, "bf16") == torch.bfloat16
    assert computing_dtype(model, "fp16") == torch.float16
    assert computing_dtype(model.to(torch.bfloat16), "no") == torch.bfloat16
    assert computing_dtype(nn.ReLU(), "no") == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_stays_below_its_peak() -> None:
    device = torch.device("cuda", 0)
    try:
        peak = peak_of(device, torch.float16)
    except LookupError as error:
        pytest.skip(str(error))
    matrix = torch.ones(8192, 8192, dtype=torch.float16, device=device)
    matrix @ matrix
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        matrix @ matrix
    end.record()
    end.synchronize()
    reached = 20 * 2 * 8192**3 / (begin.elapsed_time(end) / 1000)
    assert 0.2 < reached / peak.flops_per_second < 1.05


def test_the_newer_of_torchs_two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision, expected in (("tf32", True), ("ieee", False)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=precision))
        assert peak_flops._allows_tf32() is expected

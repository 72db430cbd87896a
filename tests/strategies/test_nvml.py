"""With a library that stands in for NVIDIA's; with the real one where there is a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_kit.strategies import nvml
from trainer_kit.strategies.nvml import card_memory

GIB = 2**30
CARD = SimpleNamespace(uuid="1234-abcd")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    nvml._card.cache_clear()
    yield
    nvml._card.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Puts a pynvml in place that knows one GPU and its processes: (number, bytes)."""

    def put(*processes: tuple[int, int | None]) -> ModuleType:
        module: Any = ModuleType("pynvml")
        module.NVMLError = type("NVMLError", (Exception,), {})
        module.nvmlInit = lambda: None
        module.nvmlDeviceGetHandleByUUID = {"GPU-1234-abcd": "card"}.__getitem__
        module.nvmlDeviceGetMemoryInfo = lambda card: SimpleNamespace(used=6 * GIB)
        module.nvmlDeviceGetComputeRunningProcesses = lambda card: [
            SimpleNamespace(pid=number, usedGpuMemory=used) for number, used in processes
        ]
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module  # type: ignore[no-any-return]

    return put


def test_the_card_and_this_process(library: Callable[..., ModuleType]) -> None:
    library((1, 3 * GIB), (os.getpid(), 2 * GIB))
    assert card_memory(CARD) == {"device_memory_gib": 6.0, "process_memory_gib": 2.0}


@pytest.mark.parametrize("processes", [[(1, 3 * GIB)], [(os.getpid(), None)]])
def test_a_driver_that_does_not_tell_of_this_process(library: Callable[..., ModuleType], processes: Any) -> None:
    library(*processes)
    assert card_memory(CARD) == {"device_memory_gib": 6.0}


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert card_memory(CARD) == {}


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_fails(library: Callable[..., ModuleType], name: str) -> None:
    module: Any = library((os.getpid(), GIB))

    def fail(*_: Any) -> None:
        raise module.NVMLError("Driver Not Loaded")

    setattr(module, name, fail)
    assert card_memory(CARD) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_card() -> None:
    pytest.importorskip("pynvml")
    torch.cuda.empty_cache()  # the allocator may hold as much from other tests
    before = card_memory(torch.cuda.get_device_properties(0))
    kept = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
    after = card_memory(torch.cuda.get_device_properties(0))
    assert after["device_memory_gib"] >= before["device_memory_gib"] + 0.9
    assert after.get("process_memory_gib", 1.0) >= kept.numel() / GIB

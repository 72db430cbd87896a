"""Callbacks that do not listen cost no call, and the simulated exchange follows its formula."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scaling")


@pytest.mark.slow
def test_callbacks_that_listen_to_nothing_cost_no_call(scaling: ModuleType) -> None:
    without = scaling.calls_with(scaling.Silent, 0)
    assert scaling.calls_with(scaling.Silent, 100) == pytest.approx(without, abs=5)  # some depend on the time
    assert without + 95 <= scaling.calls_with(scaling.Listening, 100) <= without + 500


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_an_exchange_takes_the_latencies_of_its_rounds(scaling: ModuleType, ranks: int) -> None:
    network = scaling.Network(latency=1e-3, jitter=0.0, bandwidth=1e6)
    message = 1e-3 + 100 / 1e6
    assert scaling.simulate_ring(ranks, 100, network) == pytest.approx((ranks - 1) * message)


@pytest.mark.parametrize(("ranks", "levels"), [(2, 1), (8, 1), (64, 2)])
def test_a_vote_goes_up_and_down_the_levels_of_its_tree(scaling: ModuleType, ranks: int, levels: int) -> None:
    network = scaling.Network(latency=1e-3, jitter=0.0, bandwidth=1e6, work=0.0)
    message = 1e-3 + 100 / 1e6
    assert scaling.simulate_tree(ranks, 100, network) == pytest.approx(2 * levels * message)


def test_a_late_rank_delays_all(scaling: ModuleType) -> None:
    steady = scaling.simulate_ring(8, 100, scaling.Network(1e-3, jitter=0.0))
    assert scaling.simulate_ring(8, 100, scaling.Network(1e-3, jitter=1.0)) > steady


@pytest.mark.slow
def test_the_table_has_the_ring_and_the_tree(scaling: ModuleType) -> None:
    text = scaling.measure_ranks([scaling.Network(latency=1e-3, jitter=0.0, bandwidth=1e12)])
    assert "Fewer than 32 processes use the ring" in text
    assert text.count("\n| ") == 1 + len(scaling.RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["first", "middle", "DataLoader"])
def test_a_first_batch_is_read(scaling: ModuleType, kind: str) -> None:
    assert scaling.first_batch(kind, 1000)["seconds"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the figure includes the process that started it")
def test_the_peak_memory_is_without_that_of_the_process_that_started_it() -> None:
    held = bytearray(b"1" * 400_000_000)
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import page; print(page.peak_memory())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert 1_000_000 < int(done.stdout) < len(held) / 2

"""The simulated goodput follows the formulas where they hold, and the page shows what the simulation gives."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "en" / "explanation" / "performance.md"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("goodput_simulation")


def sample(
    simulation: ModuleType, mean: float, interval: float, stall: float, restart: float, runs: int = 40
) -> tuple[float, float]:
    """Mean and standard error of the goodput at a fixed size: all failures are noticed and take no machine away."""
    inputs = dataclasses.replace(
        simulation.Inputs(), days=500 * mean / 86400, taken=0.0, silent=0.0, failures=86400 / mean / 8
    )
    costs, safety = simulation.Costs(restart, 0.0, 0.0, 0.0), simulation.Safety(interval, stall)
    way = simulation.Way(is_fixed=True)
    found = np.array([simulation.simulate(way, 64, costs, seed, inputs, safety) for seed in range(runs)])
    return float(found.mean()), float(found.std(ddof=1)) / math.sqrt(runs)


@pytest.mark.parametrize(("stall", "restart", "factor"), [(30.0, 60.0, 1.0), (30.0, 600.0, 3.0), (300.0, 1200.0, 0.5)])
def test_a_fixed_size_follows_dalys_formula(
    simulation: ModuleType, stall: float, restart: float, factor: float
) -> None:
    """Daly 2006, A higher order estimate of the optimum checkpoint interval: exact for such failures.

    Within 4 standard errors of the mean.
    """
    mean = 20_000.0
    interval = factor * math.sqrt(2 * stall * mean)
    expected = interval / (mean * math.exp(restart / mean) * math.expm1((interval + stall) / mean))
    found, error = sample(simulation, mean, interval, stall, restart)
    assert error < 0.002
    assert abs(found - expected) < 4 * error


def test_rare_failures_cost_what_youngs_formula_says(simulation: ModuleType) -> None:
    """Young 1974, A first order approximation to the optimum checkpoint interval.

    With an interval of sqrt(2 * stall * mean), sqrt(2 * stall / mean) of the time is lost, half of it by saving. The
    formula neglects terms of higher order, which are below a tenth of it here.
    """
    mean, stall = 1e6, 20.0
    found, error = sample(simulation, mean, math.sqrt(2 * stall * mean), stall, restart=0.0)
    expected = math.sqrt(2 * stall / mean)
    assert abs((1 - found) - expected) < 0.1 * expected + 4 * error
    for factor in (0.25, 4.0):  # no other interval is better
        other, more = sample(simulation, mean, factor * math.sqrt(2 * stall * mean), stall, restart=0.0)
        assert other < found + 4 * (error + more)


def test_new_processes_lose_half_an_interval_and_a_restart_a_failure(simulation: ModuleType) -> None:
    inputs = dataclasses.replace(simulation.Inputs(), taken=0.0, silent=0.0)
    costs = simulation.Costs(100.0, 0.0, 0.0, 0.0)
    machines = 1024 // inputs.gpus_per_machine
    expected = inputs.failures * machines / 86400 * (inputs.checkpoint / 2 + 100.0)
    found, error = simulation.goodput(simulation.Way(), 1024, costs, inputs)
    assert abs((1 - found) - expected) < 0.05 * expected + 4 * error


def test_missing_machines_cost_the_fullest_share_or_their_part(simulation: ModuleType) -> None:
    """A machine of 512 is away for an hour each time: 1 / 17 of its time with whole samples, or 1 / 512."""
    inputs = dataclasses.replace(simulation.Inputs(), taken=1.0, silent=0.0, failures=1e-4)
    free = simulation.Costs(0.0, 0.0, 0.0, 0.0)
    away = inputs.failures * 512 / 24  # machines, on average
    for way, part in ((simulation.Way(), 1 / 17), (simulation.Way(scales=True), 1 / 512)):
        safe = simulation.Safety(1e-3)
        found = [1 - simulation.simulate(way, 4096, free, seed, inputs, safe) for seed in range(200)]
        assert np.mean(found) == pytest.approx(away * part, rel=0.15)
    way = simulation.Way(spares=2)
    spared = [1 - simulation.simulate(way, 4096, free, seed, inputs, safe) for seed in range(200)]
    assert np.mean(spared) < 0.01 * away / 17  # while two are away already


def test_copies_are_safe_when_the_next_step_has_ended(simulation: ModuleType) -> None:
    safety = simulation._safety(simulation.Way(interval="copies"), simulation.Inputs())
    assert [safety.kept(seconds) for seconds in (0.0, 209.0, 210.0, 409.0, 410.0)] == [0, 0, 200, 200, 400]
    assert safety.work(205.0) == 205.0


def test_a_failure_of_a_run_that_waits_does_not_shorten_its_waiting(simulation: ModuleType) -> None:
    """With a machine that stays away for good, the run never goes on."""
    inputs = dataclasses.replace(simulation.Inputs(), taken=1.0, away=1e12)
    way = simulation.Way(is_fixed=True)
    first = np.random.default_rng(3).exponential(86400 / (inputs.failures * 128))
    found = simulation.simulate(way, 1024, simulation.HERE, 3, inputs)
    assert found * inputs.days * 86400 <= first


def test_the_page_shows_what_the_simulation_gives(simulation: ModuleType) -> None:
    """For some of its figures, with fewer runs."""
    [text] = re.findall(r"<!-- goodput: begin -->\n(.*?)<!-- goodput: end -->", PAGE.read_text("utf-8"), re.DOTALL)
    assert "(goodput.svg)" in text
    inputs = dataclasses.replace(simulation.Inputs(), runs=10)
    for name, way in simulation.WAYS.items():
        cells = re.findall(rf"^\| {re.escape(name)} \|(.+)\|$", text, re.MULTILINE)[0].split("|")
        shown = float(cells[simulation.GPUS.index(1024)].split("/")[1])
        found, error = simulation.goodput(way, 1024, simulation.FIELD, inputs)
        assert abs(100 * found - shown) < 0.06 + 4 * 100 * error, name


def test_the_plot_has_a_line_for_each_way(simulation: ModuleType) -> None:
    drawn = (PAGE.parent / "goodput.svg").read_text(encoding="utf-8")
    assert "imulated" in drawn
    for name in simulation.PLOTTED:
        assert f">{name.replace(chr(34), '&quot;')}</text>" in drawn
    assert drawn.count("fill:none") == 3 * len(simulation.PLOTTED)  # legend and two panels

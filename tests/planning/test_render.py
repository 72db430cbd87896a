"""A plan for people and for machines."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from scenarios.task import Noisy, StopAt, make_trainer

from trainer_kit import Callback
from trainer_kit.callbacks import EarlyStopping
from trainer_kit.planning import TrainingPlan
from trainer_kit.planning.plot import curve
from trainer_kit.planning.render import compute_lines, labelled
from trainer_kit.profiling.peak_flops import Peak

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Asking(Callback):
    """A callback of the user's."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    folder = tmp_path_factory.mktemp("plan") / "run"
    return make_trainer(folder, Asking(), EarlyStopping(), metric_for_best_model="f1").plan()


def test_a_terminal_of_80_columns(plan: TrainingPlan) -> None:
    lines = str(plan).splitlines()
    assert max(map(len, lines)) < 80
    assert lines[0] == "data         62 samples to train on"
    assert "a step       8 samples = 4 per device x 2 accumulated x 1 process" in lines
    assert "length       24 steps = 3 epochs of 8, 186 samples" in lines
    assert "  evaluate   every 4 steps: 4, 8, 12, 16, … 24 (6)" in lines
    assert "  epoch ends 8, 16, 24 (3)" in lines
    assert "             because no launcher started several processes; use_cpu=True" in lines
    assert "  callbacks  Asking, EarlyStopping may request more, or stop the run" in lines
    assert "warnings" in lines
    assert lines.index("train() would fail") < lines.index("warnings")


def test_a_kept_step_says_who_has_how_many_samples(tmp_path: Path) -> None:
    make_trainer(tmp_path, StopAt(2), save_steps=2).train()
    plan = make_trainer(tmp_path).plan(True, num_processes=3)
    assert "8 samples = 4 per device x 2 accumulated x 1 process" in str(plan)
    assert "on_resize='keep': 3 processes with 3, 3, 2 each" in str(plan)
    assert (plan.steps.last, plan.steps.left, plan.steps.samples) == (24, 22, 186 - 16)
    scaled = make_trainer(tmp_path, on_resize="scale").plan(True, num_processes=3)
    assert "24 samples = 4 per device x 2 accumulated x 3 processes" in str(scaled)
    assert "on_resize" not in str(scaled)


def test_the_rate_is_drawn_between_its_extremes(plan: TrainingPlan) -> None:
    lines = str(plan).splitlines()
    begin = lines.index("learning rate (AdamW, cosine)") + 1
    drawn = lines[begin : begin + 8]
    assert drawn[0].startswith("       0.01 ┤")
    assert drawn[-1].startswith("          0 ┤")
    assert lines[begin + 8].endswith("─")
    assert lines[begin + 9].split() == ["step", "1:", "0", "step", "24:", "5.58e-05"]


def test_for_machines(plan: TrainingPlan) -> None:
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["steps"] == {
        "first": 0, "last": 24, "left": 24, "samples": 186, "per_epoch": 8, "epochs": 3.0, "short": 6,
    }  # fmt: skip
    assert found["schedule"]["points"][3] == [4, pytest.approx(0.01)]
    assert found["events"][1]["first"] == [4, 8, 12, 16]
    assert found["problems"] == list(plan.problems)


def test_the_work_is_that_of_the_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.planning.cost.peak_of", lambda device, dtype: Peak(1e6, "a table"))
    compute = make_trainer(tmp_path).plan(num_processes=2).compute
    assert compute is not None
    # Layers of 8 x 8, 8 x 8 and 8 x 3 numbers, each taken once forward and twice backward, the first one but once.
    sample = 2 * (3 * 64 + 3 * 64 - 64 + 3 * 24)
    assert compute.step == sample * 4 * 2 * 2
    assert compute.run == pytest.approx(sample * 62 * 3)
    assert compute.seconds == pytest.approx(compute.run / 2e6)
    shown = " ".join("\n".join(compute_lines(compute)).split())
    assert "at 1 MFLOP/s, the peak of the device (a table), that takes 0.073 s at the very least" in shown
    measured = dataclasses.replace(compute, peak_source="measured: so and so", seconds=90.0)
    assert "just now (measured: so and so), that takes 1 min 30 s, " in " ".join(
        " ".join(compute_lines(measured)).split()
    )


def test_the_work_of_epochs_that_do_not_fill_a_step(tmp_path: Path) -> None:
    whole, part = (make_trainer(tmp_path, dataset=Noisy(size)).plan().compute for size in (8, 3))
    assert whole is not None
    assert part is not None
    assert part.step == pytest.approx(whole.step * 3 / 8)
    assert part.run == 3 * part.step


def test_nothing_is_left(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    shown = str(make_trainer(tmp_path, max_steps=2).plan(resume_from_checkpoint=True))
    assert "  epoch ends never\n" in shown


def unknown(device: torch.device, dtype: torch.dtype) -> Peak:
    raise LookupError("the table has no such device")


def test_a_device_without_a_known_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.planning.cost.peak_of", unknown)
    plan = make_trainer(tmp_path).plan()
    assert plan.compute is not None
    assert plan.compute.seconds is None
    assert "is not known: the table has no such device" in " ".join(str(plan).split())


def test_a_line_goes_from_corner_to_corner() -> None:
    rising = curve([(step, float(step)) for step in range(50)], width=9, height=3)
    assert rising == ["      ┌──", "   ┌──┘", "───┘"]
    falling = curve([(step, -float(step)) for step in range(50)], width=9, height=3)
    assert falling == ["───┐", "   └──┐", "      └──"]


def test_a_step_is_drawn_as_one_line() -> None:
    assert curve([(1, 0.0), (2, 1.0)], width=4, height=3) == ["  ┌─", "  │", "──┘"]


def test_a_curve_has_the_width_of_its_frame_in_any_font(plan: TrainingPlan) -> None:
    assert set(str(plan)) <= {*map(chr, range(32, 127)), *"\n…│┤└─┌┐┘"}  # no letter is taken from another font


def test_a_constant_is_drawn_in_the_middle() -> None:
    assert [bool(line) for line in curve([(1, 0.5)], width=4, height=3)] == [False, True, False]


def test_a_curve_is_as_wide_as_asked() -> None:
    points = [(step, math.sin(step)) for step in range(1000)]
    assert max(map(len, curve(points, width=66))) <= 66


def test_a_number_stays_with_its_unit() -> None:
    lines = labelled("size", f"{'x' * 60} 12.5 kB")
    assert lines == [f"size         {'x' * 60}", f"{'':13}12.5 kB"]
